// SPDX-License-Identifier: BSD-3-Clause
// What FusedAdam's step and its archives both need to know about options and states.
#pragma once

#include <ATen/core/Tensor.h>
#include <torchfuse/optim/fused_adam.h>

#include <cstddef>

namespace torchfuse::optim {

inline constexpr const char* kFusedAdamName = "FusedAdam";

inline const FusedAdamOptions& adam_options(const torch::optim::OptimizerOptions& options) {
  return static_cast<const FusedAdamOptions&>(options);
}

inline bool wants_master(const at::Tensor& param, const FusedAdamOptions& options) {
  const at::ScalarType dtype = param.scalar_type();
  return options.master_weights() && (dtype == at::kHalf || dtype == at::kBFloat16);
}

inline at::ScalarType moment_dtype(const at::Tensor& param) {
  return param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// Throws, naming the group, if an optimizer-wide option differs from `wide`.
void check_wide_options(const FusedAdamOptions& options, const FusedAdamOptions& wide,
                        std::size_t group);

}  // namespace torchfuse::optim
