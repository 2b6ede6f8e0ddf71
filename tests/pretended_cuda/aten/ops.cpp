// SPDX-License-Identifier: BSD-3-Clause
#include "ops.h"

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <unordered_set>

#include "host_view.h"

namespace pretended_cuda {
namespace {

using Names = std::unordered_set<std::string_view>;

const Names kOwnCode = {
    "_copy_from_and_resize",
    "_efficientzerotensor",
    "_local_scalar_dense",
    "_pin_memory",
    "_reshape_alias",
    "alias",
    "as_strided",
    "is_pinned",
    "is_set_to",
    "lift_fresh",
    "record_stream",
    "resize_",
    "set_",
    "unfold",
    "view",
    "view_as_complex",
    "view_as_real",
};

const Names kRedirectedAnyway = {"convolution", "convolution_backward"};

const Names kSynchronizing = {
    "_unique",
    "_unique2",
    "bincount",
    "equal",
    "masked_select",
    "nonzero",
    "nonzero_static",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
    "unique_dim_consecutive",
};

/// With a mask they look for its elements first.
const Names kIndexing = {"_index_put_impl_", "_unsafe_index", "index", "index_put", "index_put_"};

/// Their results have other sizes on the CPU than on CUDA.
const Names kUnlikeMeta = {"_embedding_bag", "_embedding_bag_forward_only"};

std::string_view bare_name(const c10::OperatorHandle& op) {
  std::string_view name = op.schema().name();
  name.remove_prefix(name.find("::") + 2);
  return name;
}

bool has_mask(const torch::jit::Stack& arguments) {
  bool found = false;
  for (const c10::IValue& value : arguments) {
    if (!value.isOptionalTensorList()) continue;
    for_each_tensor(value, [&](const at::Tensor& index) {
      if (!on_device(index)) return;
      found = found || index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
    });
  }
  return found;
}

}  // namespace

bool keeps_its_own_code(const c10::OperatorHandle& op) { return kOwnCode.contains(bare_name(op)); }

bool is_redirected_anyway(const c10::OperatorHandle& op) {
  return kRedirectedAnyway.contains(bare_name(op));
}

bool differs_from_meta(const c10::OperatorHandle& op) {
  return kUnlikeMeta.contains(bare_name(op));
}

bool spans_devices(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  if (bare_name(op).substr(0, 9) != "_foreach_") return false;
  std::optional<c10::Device> first;
  bool several = false;
  for (const c10::IValue& value : arguments) {
    if (!value.isTensorList()) continue;
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (!first) first = tensor.device();
      several = several || tensor.device() != *first;
    });
  }
  return several;
}

bool synchronizes(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  const std::string_view name = bare_name(op);
  return kSynchronizing.contains(name) || (kIndexing.contains(name) && has_mask(arguments));
}

}  // namespace pretended_cuda
