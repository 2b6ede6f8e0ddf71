// SPDX-License-Identifier: BSD-3-Clause
// Small builders for the tests of the scaler.
#pragma once

#include <torch/torch.h>
#include <torchfuse/amp/grad_scaler.h>
#include <torchfuse/optim/fused_adam.h>

#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "../optim/optim_testing.h"

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

/// A fused optimizer, which skips by itself, and another one.
using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<torch::Tensor>&)>;
inline const MakeOptimizer kFusedAdam = [](const std::vector<torch::Tensor>& params) {
  return std::make_unique<optim::FusedAdam>(params, optim::FusedAdamOptions(0.1));
};
inline const MakeOptimizer kSgd = [](const std::vector<torch::Tensor>& params) {
  return std::make_unique<torch::optim::SGD>(params, torch::optim::SGDOptions(0.1));
};

/// One iteration with the gradients that are there; whether the parameters stayed as they were.
inline bool skips(amp::GradScaler& scaler, torch::optim::Optimizer& optimizer, bool unscale) {
  const auto& params = optimizer.param_groups()[0].params();
  scaler.scale(torch::zeros({}));
  const auto before = copy_of(params);
  if (unscale) scaler.unscale_(optimizer);
  scaler.step(optimizer);
  scaler.update();
  return torch::equal(before[0], params[0]);
}

/// The same with gradients of its own.
inline bool iterate(amp::GradScaler& scaler, torch::optim::Optimizer& optimizer, bool overflow,
                    bool unscale = false) {
  const auto& params = optimizer.param_groups()[0].params();
  set_grads(params, 1);
  if (overflow) params.back().mutable_grad().view(-1)[-1] = kInf;
  return skips(scaler, optimizer, unscale);
}

}  // namespace torchfuse::testing
