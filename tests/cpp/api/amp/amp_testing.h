// SPDX-License-Identifier: BSD-3-Clause
// Small builders for the tests of the scaler.
#pragma once

#include <torch/torch.h>
#include <torchfuse/amp/grad_scaler.h>

#include <limits>
#include <vector>

namespace torchfuse::testing {

inline constexpr float kInf = std::numeric_limits<float>::infinity();

inline amp::GradScaler make_scaler(double init_scale = 16.0) {
  return amp::GradScaler(torch::kCPU, amp::GradScalerOptions().init_scale(init_scale));
}

/// Scales something, so that the scale exists.
inline amp::GradScaler started_scaler(double init_scale = 16.0) {
  amp::GradScaler scaler = make_scaler(init_scale);
  scaler.scale(torch::zeros({}));
  return scaler;
}

inline std::vector<torch::Tensor> copies(const std::vector<torch::Tensor>& tensors) {
  std::vector<torch::Tensor> result;
  for (const torch::Tensor& tensor : tensors) result.push_back(tensor.detach().clone());
  return result;
}

}  // namespace torchfuse::testing
