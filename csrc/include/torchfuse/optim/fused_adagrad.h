// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/arg.h>
#include <torch/types.h>

#include <torchfuse/export.h>
#include <torchfuse/optim/fused_optimizer.h>
#include <torchfuse/optim/fused_options.h>

namespace torchfuse::optim {

/// FusedAdagrad's hyper-parameters, with names and defaults from torch::optim::Adagrad and
/// apex.optimizers.FusedAdagrad.
struct TORCHFUSE_API FusedAdagradOptions : public FusedOptionsOf<FusedAdagradOptions> {
  /// Converts a learning rate to options, as torch's options do.
  // NOLINTNEXTLINE(google-explicit-constructor)
  FusedAdagradOptions(double lr = 1e-2) : FusedOptionsOf(lr) {}

  TORCH_ARG(double, lr_decay) = 0.0;      ///< divides lr by 1 + (step - 1) lr_decay; >= 0
  TORCH_ARG(double, eps) = 1e-10;         ///< added to the denominator, >= 0
  TORCH_ARG(double, weight_decay) = 0.0;  ///< weight decay, >= 0
  TORCH_ARG(double, initial_accumulator_value) = 0.0;  ///< initial value of `sum`, >= 0
  TORCH_ARG(bool,
            adagrad_w_mode) = false;  ///< decoupled decay; false: L2, as in torch
  TORCH_ARG(bool, maximize) = false;  ///< ascend instead of descend
};

/// Per-parameter state, with names from torch.optim.Adagrad.
struct TORCHFUSE_API FusedAdagradParamState
    : public FusedParamStateOf<FusedAdagradParamState, FusedAdagradOptions> {
  TORCH_ARG(torch::Tensor, sum) = {};  ///< sum of squared gradients
};

extern template struct FusedOptionsOf<FusedAdagradOptions>;
extern template struct FusedParamStateOf<FusedAdagradParamState, FusedAdagradOptions>;
extern template class FusedOptimizerOf<FusedAdagradOptions, FusedAdagradParamState>;

/// Adagrad in one fused pass; see torchfuse::fused_adagrad_() for the formula. Sums are fp32 for
/// fp16 and bf16 parameters, unless `state_dtype` is set.
///
///     using torchfuse::optim::FusedAdagrad;
///     using torchfuse::optim::FusedAdagradOptions;
///     FusedAdagrad optimizer(model->parameters(), FusedAdagradOptions(1e-2).weight_decay(1e-4));
///
/// @throws c10::Error for options out of range, naming the option and the group.
class TORCHFUSE_API FusedAdagrad
    : public FusedOptimizerOf<FusedAdagradOptions, FusedAdagradParamState> {
 public:
  using FusedOptimizerOf::FusedOptimizerOf;
};

}  // namespace torchfuse::optim
