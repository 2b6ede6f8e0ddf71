// SPDX-License-Identifier: BSD-3-Clause
// Parameters on the CPU, and what an Adam step needs besides.
#pragma once

#include <torch/torch.h>
#include <torchfuse/fused_step.h>

#include <vector>

#include "../../api/expect_error.h"

namespace torchfuse {

inline const std::vector<HyperParam> kGroup{1e-2, 0.9, 0.999, 0.1, 1e-8, 0.0, 0.0, 1.0, 1.0};

inline FusedSlot make_slot(const at::Tensor& param) {
  FusedSlot slot;
  slot.param = param;
  slot.states = {torch::zeros_like(param), torch::zeros_like(param), at::Tensor()};
  slot.step = torch::zeros({});
  return slot;
}

inline at::Tensor make_param(at::IntArrayRef sizes) {
  at::Tensor param = torch::randn(sizes).requires_grad_();
  param.mutable_grad() = torch::randn(sizes);
  return param;
}

using testing::expect_error;

}  // namespace torchfuse
