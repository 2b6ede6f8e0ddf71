// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/arg.h>
#include <torch/types.h>

#include <optional>
#include <tuple>

#include <torchfuse/export.h>
#include <torchfuse/optim/fused_optimizer.h>
#include <torchfuse/optim/fused_options.h>

namespace torchfuse::optim {

/// FusedAdam's hyper-parameters, with names and defaults from apex.optimizers.FusedAdam.
struct TORCHFUSE_API FusedAdamOptions : public FusedOptionsOf<FusedAdamOptions> {
  using betas_t = std::tuple<double, double>;  ///< as in torch::optim::AdamOptions

  /// Converts a learning rate to options, as torch's options do.
  // NOLINTNEXTLINE(google-explicit-constructor)
  FusedAdamOptions(double lr = 1e-3) : FusedOptionsOf(lr) {}

  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);  ///< moment decay rates, in [0, 1)
  TORCH_ARG(double, eps) = 1e-8;                            ///< added to the denominator, >= 0
  TORCH_ARG(double, weight_decay) = 0.0;                    ///< weight decay, >= 0
  TORCH_ARG(bool, bias_correction) = true;                  ///< divide the moments by 1 - beta^step
  TORCH_ARG(bool, adam_w_mode) = true;  ///< decoupled decay; false: L2, as in torch::optim::Adam
  TORCH_ARG(bool, amsgrad) = false;     ///< use the running maximum of exp_avg_sq
  TORCH_ARG(bool, maximize) = false;    ///< ascend instead of descend
  /// Dtype of exp_avg. `nullopt` (default) means `state_dtype`.
  TORCH_ARG(std::optional<at::ScalarType>, exp_avg_dtype) = std::nullopt;
  /// Dtype of exp_avg_sq and max_exp_avg_sq. `nullopt` (default) means `state_dtype`.
  TORCH_ARG(std::optional<at::ScalarType>, exp_avg_sq_dtype) = std::nullopt;
};

/// Per-parameter state, with names from torch.optim.Adam.
struct TORCHFUSE_API FusedAdamParamState
    : public FusedParamStateOf<FusedAdamParamState, FusedAdamOptions> {
  TORCH_ARG(torch::Tensor, exp_avg) = {};         ///< moving average of gradients
  TORCH_ARG(torch::Tensor, exp_avg_sq) = {};      ///< moving average of squared gradients
  TORCH_ARG(torch::Tensor, max_exp_avg_sq) = {};  ///< maximum of exp_avg_sq; only with amsgrad
};

extern template struct FusedOptionsOf<FusedAdamOptions>;
extern template struct FusedParamStateOf<FusedAdamParamState, FusedAdamOptions>;
extern template class FusedOptimizerOf<FusedAdamOptions, FusedAdamParamState>;

/// Adam and AdamW in one fused pass; see torchfuse::fused_adam_() for the formula. Moments are fp32
/// for fp16 and bf16 parameters, unless the dtype options are set.
///
///     using torchfuse::optim::FusedAdam;
///     using torchfuse::optim::FusedAdamOptions;
///     FusedAdam optimizer(model->parameters(), FusedAdamOptions(1e-3).weight_decay(0.01));
///
/// @throws c10::Error for options out of range, naming the option and the group.
class TORCHFUSE_API FusedAdam : public FusedOptimizerOf<FusedAdamOptions, FusedAdamParamState> {
 public:
  using FusedOptimizerOf::FusedOptimizerOf;
};

}  // namespace torchfuse::optim
