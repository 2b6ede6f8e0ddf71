// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/clip_grad.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/div.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DispatchKey.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

#include <torchfuse/collectives.h>
#include <torchfuse/device_copy.h>
#include <torchfuse/ops.h>

namespace torchfuse {
namespace {

// Errors name the public function, even if an inner function throws.
constexpr const char* kClipNorm = "clip_grad_norm_";
constexpr const char* kClipValue = "clip_grad_value_";
constexpr double kInfinity = std::numeric_limits<double>::infinity();

using ShardGroups = std::vector<std::vector<std::string>>;

/// Tensors that one launch processes together.
struct Part {
  at::Device device;
  bool native;           ///< uses our kernels, which compute in fp32, instead of ATen
  at::ScalarType dtype;  ///< undefined if dtypes may be mixed
  std::vector<std::string> shard_groups;
  std::vector<at::Tensor> tensors;
};

/// Returns whether our kernels support the tensor. fp64 needs ATen: our norm and factor are fp32.
bool is_native(const at::Tensor& tensor) {
  const at::ScalarType dtype = tensor.scalar_type();
  return (tensor.is_cpu() || tensor.is_cuda()) && tensor.layout() == at::kStrided &&
         (dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16) &&
         !tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python);
}

/// @param mix_native whether tensors for our kernels share a part even if their dtypes differ.
std::vector<Part> parts_of(const char* function, const std::vector<at::Tensor>& tensors,
                           bool mix_native, const ShardGroups& shard_groups = {}) {
  static const std::vector<std::string> kWhole;
  std::vector<Part> parts;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (!tensor.defined()) continue;
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, function,
                                ": expected the gradient of parameters[", i,
                                "] to be dense, got one of layout ", tensor.layout(),
                                ". Leave the parameter out, or use a layer without sparse=True.");
    const bool native = is_native(tensor);
    const at::ScalarType dtype =
        native && mix_native ? at::ScalarType::Undefined : tensor.scalar_type();
    const std::vector<std::string>& groups = shard_groups.empty() ? kWhole : shard_groups[i];
    const auto part = std::find_if(parts.begin(), parts.end(), [&](const Part& candidate) {
      return candidate.dtype == dtype && candidate.device == tensor.device() &&
             candidate.native == native && candidate.shard_groups == groups;
    });
    if (part != parts.end()) {
      part->tensors.push_back(tensor);
    } else {
      parts.push_back({tensor.device(), native, dtype, groups, {tensor}});
    }
  }
  return parts;
}

/// Returns an fp64 vector: one norm per tensor, or a single norm if our kernel supports the part.
at::Tensor norms_of(const Part& part, double norm_type) {
  if (part.native && norm_type == 2.0) {
    return std::get<0>(multi_tensor_l2_norm(part.tensors)).to(at::kDouble).reshape({1});
  }
  // An empty tensor must not change the norm.
  const double nothing = norm_type < 0.0 ? kInfinity : 0.0;
  std::vector<at::Tensor> tensors = part.tensors;
  for (at::Tensor& tensor : tensors) {
    if (tensor.numel() == 0) tensor = at::full({1}, nothing, tensor.options());
  }
  const bool narrow = part.dtype == at::kHalf || part.dtype == at::kBFloat16;
  const auto dtype = narrow ? std::optional<at::ScalarType>(at::kFloat) : std::nullopt;
  return at::stack(at::_foreach_norm(tensors, norm_type, dtype)).to(at::kDouble);
}

/// Combines the norms of shards to the norms of the unsharded tensors.
at::Tensor over_shards(at::Tensor norms, double norm_type, const std::vector<std::string>& groups) {
  if (groups.empty()) return norms;
  if (std::isinf(norm_type)) {
    // A max all-reduce may lose a NaN, so the second row sends NaN flags.
    const double sign = norm_type < 0.0 ? -1.0 : 1.0;
    const at::Tensor nan = norms.isnan();
    const at::Tensor sent = at::stack({norms.masked_fill(nan, 0.0).mul(sign), nan.to(at::kDouble)});
    all_reduce_(sent, "max", groups);
    return sent[0].mul(sign).masked_fill(sent[1].ne(0.0), std::nan(""));
  }
  const bool counts = norm_type == 0.0;
  const at::Tensor powers = counts ? norms.contiguous() : norms.pow(norm_type);
  all_reduce_(powers, "sum", groups);
  return counts ? powers : powers.pow(1.0 / norm_type);
}

at::ScalarType norm_dtype(const std::vector<at::Tensor>& tensors) {
  const bool wide = std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
    return tensor.defined() && c10::toRealValueType(tensor.scalar_type()) == at::kDouble;
  });
  return wide ? at::kDouble : at::kFloat;
}

void check_max_norm(double max_norm) {
  // Written so that NaN fails.
  TORCH_CHECK_VALUE(max_norm >= 0.0, kClipNorm, ": expected max_norm to be at least 0, got ",
                    max_norm, ". Use infinity to measure only.");
}

/// Returns each parameter's gradient; undefined if there is none.
std::vector<at::Tensor> grads_of(const char* function, const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> grads;
  grads.reserve(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    TORCH_CHECK_TYPE(parameters[i].defined(), function, ": expected parameters[", i,
                     "] to be a tensor, got an undefined one. Leave it out.");
    grads.push_back(parameters[i].grad());
  }
  return grads;
}

}  // namespace

at::Tensor get_total_norm(const std::vector<at::Tensor>& tensors, double norm_type,
                          const ShardGroups& shard_groups) {
  TORCH_CHECK_VALUE(!std::isnan(norm_type), kClipNorm,
                    ": expected norm_type to be a number, got nan. Use 2 or infinity.");
  TORCH_CHECK_VALUE(shard_groups.empty() || shard_groups.size() == tensors.size(), kClipNorm,
                    ": expected shard_groups to have one entry for each of the ", tensors.size(),
                    " tensors, got ", shard_groups.size(),
                    ". Leave shard_groups empty if no tensor is sharded.");
  const at::NoGradGuard no_grad;
  const std::vector<Part> parts =
      parts_of(kClipNorm, tensors, /*mix_native=*/norm_type == 2.0, shard_groups);
  if (parts.empty()) return at::zeros({}, at::kFloat);
  const Part& first = parts.front();
  if (parts.size() == 1 && first.native && norm_type == 2.0 && first.shard_groups.empty()) {
    return std::get<0>(multi_tensor_l2_norm(first.tensors));
  }
  std::vector<at::Tensor> norms;
  norms.reserve(parts.size());
  for (const Part& part : parts) {
    norms.push_back(to_device(over_shards(norms_of(part, norm_type), norm_type, part.shard_groups),
                              first.device));
  }
  return at::linalg_vector_norm(at::cat(norms), norm_type).to(norm_dtype(tensors));
}

void clip_with_norm_(const std::vector<at::Tensor>& tensors, double max_norm,
                     const at::Tensor& total_norm) {
  check_max_norm(max_norm);
  TORCH_CHECK_VALUE(total_norm.defined() && total_norm.numel() == 1, kClipNorm,
                    ": expected total_norm to be a tensor of 1 element, got ",
                    total_norm.defined() ? c10::str("sizes ", total_norm.sizes()) : "none",
                    ". Pass the result of get_total_norm().");
  const at::NoGradGuard no_grad;
  const std::vector<Part> parts = parts_of(kClipNorm, tensors, /*mix_native=*/true);
  if (parts.empty()) return;
  // 0-dim CPU tensors become kernel arguments, without a copy. Their dtype makes the quotient fp64.
  const auto constant = [](double value) { return at::scalar_tensor(value, at::kDouble); };
  const at::Tensor norm = total_norm.detach().reshape({});
  const at::Tensor factor =
      at::div(constant(max_norm), at::add(norm, constant(1e-6))).clamp_max_(1.0);
  for (const Part& part : parts) {
    const at::Tensor own = to_device(factor, part.device);
    if (part.native) {
      const at::Tensor found_inf = at::zeros({}, own.options().dtype(at::kFloat));
      multi_tensor_unscale_(part.tensors, found_inf, own.to(at::kFloat));
    } else {
      at::_foreach_mul_(part.tensors, own);
    }
  }
}

at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                           double norm_type, bool error_if_nonfinite) {
  check_max_norm(max_norm);
  const std::vector<at::Tensor> grads = grads_of(kClipNorm, parameters);
  at::Tensor norm = get_total_norm(grads, norm_type);
  TORCH_CHECK(!error_if_nonfinite || at::isfinite(norm).item<bool>(), "The total norm of order ",
              norm_type,
              " for gradients from `parameters` is non-finite, so it cannot be clipped. To disable "
              "this error and scale the gradients with the non-finite norm anyway, set "
              "`error_if_nonfinite=false`");
  clip_with_norm_(grads, max_norm, norm);
  return norm;
}

void clip_value_(const std::vector<at::Tensor>& tensors, double clip_value) {
  TORCH_CHECK_VALUE(clip_value >= 0.0, kClipValue, ": expected clip_value to be at least 0, got ",
                    clip_value, ". Gradients are clamped to [-clip_value, clip_value].");
  const at::NoGradGuard no_grad;
  for (const Part& part : parts_of(kClipValue, tensors, /*mix_native=*/false)) {
    if (part.device.is_cpu()) {
      // On the CPU, one clamp_ is one pass; the two list calls would be two.
      for (at::Tensor tensor : part.tensors) tensor.clamp_(-clip_value, clip_value);
    } else {
      at::_foreach_clamp_min_(part.tensors, -clip_value);
      at::_foreach_clamp_max_(part.tensors, clip_value);
    }
  }
}

void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value) {
  clip_value_(grads_of(kClipValue, parameters), clip_value);
}

}  // namespace torchfuse
