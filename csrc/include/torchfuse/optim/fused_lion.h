// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/arg.h>
#include <torch/types.h>

#include <tuple>

#include <torchfuse/export.h>
#include <torchfuse/optim/fused_optimizer.h>
#include <torchfuse/optim/fused_options.h>

namespace torchfuse::optim {

/// FusedLion's hyper-parameters.
struct TORCHFUSE_API FusedLionOptions : public FusedOptionsOf<FusedLionOptions> {
  using betas_t = std::tuple<double, double>;  ///< as in torch::optim::AdamOptions

  /// Converts a learning rate to options, as torch's options do.
  // NOLINTNEXTLINE(google-explicit-constructor)
  FusedLionOptions(double lr = 1e-4) : FusedOptionsOf(lr) {}

  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.99);  ///< decay rates, in [0, 1)
  TORCH_ARG(double, weight_decay) = 0.0;                   ///< decoupled weight decay, >= 0
  TORCH_ARG(bool, maximize) = false;                       ///< ascend instead of descend
  /// Dtype of exp_avg, the only state. `nullopt` (default) means `state_dtype`.
  TORCH_ARG(std::optional<at::ScalarType>, exp_avg_dtype) = std::nullopt;
};

/// Per-parameter state.
struct TORCHFUSE_API FusedLionParamState
    : public FusedParamStateOf<FusedLionParamState, FusedLionOptions> {
  TORCH_ARG(torch::Tensor, exp_avg) = {};  ///< moving average of gradients
};

extern template struct FusedOptionsOf<FusedLionOptions>;
extern template struct FusedParamStateOf<FusedLionParamState, FusedLionOptions>;
extern template class FusedOptimizerOf<FusedLionOptions, FusedLionParamState>;

/// Lion in one fused pass; see torchfuse::fused_lion_() for the formula. `exp_avg` is fp32 for fp16
/// and bf16 parameters, unless the dtype options are set.
///
///     using torchfuse::optim::FusedLion;
///     using torchfuse::optim::FusedLionOptions;
///     FusedLion optimizer(model->parameters(), FusedLionOptions(1e-4).weight_decay(0.1));
///
/// @throws c10::Error for options out of range, naming the option and the group.
class TORCHFUSE_API FusedLion : public FusedOptimizerOf<FusedLionOptions, FusedLionParamState> {
 public:
  using FusedOptimizerOf::FusedOptimizerOf;
};

}  // namespace torchfuse::optim
