// SPDX-License-Identifier: BSD-3-Clause
// Norm groups: ranks that step other parameters of the same model.
#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <torchfuse/collectives.h>
#include <torchfuse/device_copy.h>
#include <torchfuse/optim/fused_optimizer.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fused_optimizer_impl.h"

namespace torchfuse::optim {

using torch::optim::OptimizerParamGroup;

void FusedOptimizer::set_norm_groups(std::vector<std::string> names) {
  TORCH_CHECK(impl_ != nullptr, name(), ": expected an optimizer, got a moved-from object.");
  const Exclusive exclusive(impl_->lock, name());
  const std::string caller = std::string(name()) + "::set_norm_groups";
  std::vector<std::string> shared;
  for (auto entry = names.begin(); entry != names.end(); ++entry) {
    TORCH_CHECK(std::find(names.begin(), entry, *entry) == entry, caller,
                ": expected each group once, got '", *entry,
                "' a second time. Remove the duplicate.");
    if (impl_->shards) {
      const std::vector<std::string>& split = impl_->shards->groups;
      TORCH_CHECK(std::find(split.begin(), split.end(), *entry) == split.end(), caller,
                  ": expected groups whose ranks step other parameters, got '", *entry,
                  "', whose ranks have shards of the same parameters. Leave '", *entry, "' out.");
    }
    if (group_size(*entry, caller) > 1) shared.push_back(*entry);
  }
  impl_->norm_groups = std::move(shared);
}

void FusedOptimizer::agree_on_overflow(std::vector<at::Tensor>& flags) const {
  if (impl_ == nullptr || impl_->norm_groups.empty()) return;
  at::Tensor found = at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(norm_device()));
  for (const at::Tensor& flag : flags) {
    found = at::maximum(found, to_device(flag, found.device()).reshape({}));
  }
  all_reduce_(found, "max", impl_->norm_groups, std::string(name()) + ": found_inf");
  flags = {found};
}

at::Device FusedOptimizer::norm_device() const {
  for (const OptimizerParamGroup& group : param_groups_) {
    for (const at::Tensor& param : group.params()) return param.device();
  }
  return at::kCPU;
}

std::optional<at::Device> FusedOptimizer::device_of_grads() const {
  if (impl_ != nullptr && !impl_->norm_groups.empty()) return norm_device();
  for (const OptimizerParamGroup& group : groups_with_gradients()) {
    for (const at::Tensor& param : group.params()) {
      if (param.defined() && param.grad().defined()) return param.device();
    }
  }
  return std::nullopt;
}

}  // namespace torchfuse::optim
