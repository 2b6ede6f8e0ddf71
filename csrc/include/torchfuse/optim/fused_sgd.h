// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/arg.h>
#include <torch/types.h>

#include <torchfuse/export.h>
#include <torchfuse/optim/fused_optimizer.h>
#include <torchfuse/optim/fused_options.h>

namespace torchfuse::optim {

/// FusedSGD's hyper-parameters, with names from torch::optim::SGD and apex.optimizers.FusedSGD.
struct TORCHFUSE_API FusedSGDOptions : public FusedOptionsOf<FusedSGDOptions> {
  /// Converts a learning rate to options, as torch's options do.
  // NOLINTNEXTLINE(google-explicit-constructor)
  FusedSGDOptions(double lr = 1e-3) : FusedOptionsOf(lr) {}

  TORCH_ARG(double, momentum) = 0.0;           ///< decay rate of the buffer, >= 0; 0: no buffer
  TORCH_ARG(double, dampening) = 0.0;          ///< gradients are multiplied by 1 - dampening; >= 0
  TORCH_ARG(double, weight_decay) = 0.0;       ///< L2 regularization, >= 0
  TORCH_ARG(bool, nesterov) = false;           ///< requires momentum > 0 and dampening 0
  TORCH_ARG(bool, wd_after_momentum) = false;  ///< add the weight decay after the momentum
  TORCH_ARG(bool, maximize) = false;           ///< ascend instead of descend
};

/// Per-parameter state, with names from torch.optim.SGD.
struct TORCHFUSE_API FusedSGDParamState
    : public FusedParamStateOf<FusedSGDParamState, FusedSGDOptions> {
  TORCH_ARG(torch::Tensor, momentum_buffer) = {};  ///< decaying sum of gradients, if momentum > 0
  /// Step count at which momentum_buffer was created, 0-dim fp32. Undefined means 0.
  TORCH_ARG(torch::Tensor, momentum_start) = {};
};

extern template struct FusedOptionsOf<FusedSGDOptions>;
extern template struct FusedParamStateOf<FusedSGDParamState, FusedSGDOptions>;
extern template class FusedOptimizerOf<FusedSGDOptions, FusedSGDParamState>;

/// SGD with momentum in one fused pass; see torchfuse::fused_sgd_() for the formula. The momentum
/// buffer is fp32 for fp16 and bf16 parameters, unless `state_dtype` is set. With momentum 0 there
/// is no buffer. The buffer's first update copies the gradient, without dampening. For a buffer
/// that is created after the first step, `momentum_start` stores the step count at its creation.
///
///     using torchfuse::optim::FusedSGD;
///     using torchfuse::optim::FusedSGDOptions;
///     FusedSGD optimizer(model->parameters(), FusedSGDOptions(0.1).momentum(0.9).nesterov(true));
///
/// @throws c10::Error for options out of range, naming the option and the group.
class TORCHFUSE_API FusedSGD : public FusedOptimizerOf<FusedSGDOptions, FusedSGDParamState> {
 public:
  using FusedOptimizerOf::FusedOptimizerOf;
};

}  // namespace torchfuse::optim
