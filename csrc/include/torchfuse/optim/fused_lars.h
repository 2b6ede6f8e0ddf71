// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/arg.h>
#include <torch/types.h>

#include <torchfuse/export.h>
#include <torchfuse/optim/fused_optimizer.h>
#include <torchfuse/optim/fused_options.h>

namespace torchfuse::optim {

/// FusedLARS's hyper-parameters.
struct TORCHFUSE_API FusedLARSOptions : public FusedOptionsOf<FusedLARSOptions> {
  /// Converts a learning rate to options, as torch's options do.
  // NOLINTNEXTLINE(google-explicit-constructor)
  FusedLARSOptions(double lr = 1.0) : FusedOptionsOf(lr) {}

  TORCH_ARG(double, momentum) = 0.9;             ///< decay rate of the momentum buffer, >= 0
  TORCH_ARG(double, weight_decay) = 0.0;         ///< L2 regularization, >= 0
  TORCH_ARG(double, trust_coefficient) = 0.001;  ///< multiplies the local learning rate; >= 0
  TORCH_ARG(double, eps) = 1e-8;                 ///< added to the denominator, >= 0
  TORCH_ARG(bool, nesterov) = false;             ///< Nesterov momentum; requires momentum > 0
  TORCH_ARG(bool, maximize) = false;             ///< ascend instead of descend
};

/// Per-parameter state.
struct TORCHFUSE_API FusedLARSParamState
    : public FusedParamStateOf<FusedLARSParamState, FusedLARSOptions> {
  TORCH_ARG(torch::Tensor, momentum_buffer) = {};  ///< decaying sum of updates, including lr
};

extern template struct FusedOptionsOf<FusedLARSOptions>;
extern template struct FusedParamStateOf<FusedLARSParamState, FusedLARSOptions>;
extern template class FusedOptimizerOf<FusedLARSOptions, FusedLARSParamState>;

/// LARS in two fused passes; see torchfuse::fused_lars_() for the formula. The momentum buffer
/// includes the learning rate. The buffer is fp32 for fp16 and bf16 parameters, unless
/// `state_dtype` is set.
///
///     using torchfuse::optim::FusedLARS;
///     using torchfuse::optim::FusedLARSOptions;
///     FusedLARS optimizer(model->parameters(), FusedLARSOptions(2.0).weight_decay(1e-4));
///
/// @throws c10::Error for options out of range, naming the option and the group.
class TORCHFUSE_API FusedLARS : public FusedOptimizerOf<FusedLARSOptions, FusedLARSParamState> {
 public:
  using FusedOptimizerOf::FusedOptimizerOf;
};

}  // namespace torchfuse::optim
