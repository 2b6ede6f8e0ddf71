// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/arg.h>
#include <torch/types.h>

#include <torchfuse/export.h>
#include <torchfuse/optim/fused_optimizer.h>
#include <torchfuse/optim/fused_options.h>

namespace torchfuse::optim {

/// Hyper-parameters of FusedSGD, with the names of torch::optim::SGD and apex.optimizers.FusedSGD.
struct TORCHFUSE_API FusedSGDOptions : public FusedOptionsOf<FusedSGDOptions> {
  /// Converts a learning rate to options, as torch's options do.
  // NOLINTNEXTLINE(google-explicit-constructor)
  FusedSGDOptions(double lr = 1e-3) : FusedOptionsOf(lr) {}

  TORCH_ARG(double, momentum) = 0.0;           ///< decay rate of the buffer, >= 0; 0: no buffer
  TORCH_ARG(double, dampening) = 0.0;          ///< gradients are weighted by 1 - dampening; >= 0
  TORCH_ARG(double, weight_decay) = 0.0;       ///< L2 regularization, >= 0
  TORCH_ARG(bool, nesterov) = false;           ///< requires momentum > 0 and dampening 0
  TORCH_ARG(bool, wd_after_momentum) = false;  ///< add the decay after the momentum, not before it
  TORCH_ARG(bool, maximize) = false;           ///< ascend instead of descend
};

/// State of one parameter, with the names of torch.optim.SGD.
struct TORCHFUSE_API FusedSGDParamState
    : public FusedParamStateOf<FusedSGDParamState, FusedSGDOptions> {
  TORCH_ARG(torch::Tensor, momentum_buffer) = {};  ///< decaying sum of gradients, if momentum > 0
  /// What `step` was when the buffer was made, 0-dim fp32; undefined: 0.
  TORCH_ARG(torch::Tensor, momentum_start) = {};
};

extern template struct FusedOptionsOf<FusedSGDOptions>;
extern template struct FusedParamStateOf<FusedSGDParamState, FusedSGDOptions>;
extern template class FusedOptimizerOf<FusedSGDOptions, FusedSGDParamState>;

/// SGD with momentum in one fused pass; see torchfuse::fused_sgd_() for the formula. The momentum
/// buffer is fp32 for fp16 and bf16 parameters, unless `state_dtype` is set; with momentum 0 there
/// is none. If it is created later, the state's `momentum_start` is the step count then: the
/// buffer's first update takes the whole gradient.
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
