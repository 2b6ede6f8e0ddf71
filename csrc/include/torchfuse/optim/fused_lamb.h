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

/// FusedLAMB's hyper-parameters, with names and defaults from apex.optimizers.FusedLAMB.
/// max_grad_norm is 1 by default.
struct TORCHFUSE_API FusedLAMBOptions : public FusedOptionsOf<FusedLAMBOptions> {
  using betas_t = std::tuple<double, double>;  ///< as in torch::optim::AdamOptions

  /// Converts a learning rate to options, as torch's options do.
  // NOLINTNEXTLINE(google-explicit-constructor)
  FusedLAMBOptions(double lr = 1e-3) : FusedOptionsOf(lr) { max_grad_norm(1.0); }

  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);  ///< moment decay rates, in [0, 1)
  TORCH_ARG(double, eps) = 1e-6;                            ///< added to the denominator, >= 0
  TORCH_ARG(double, weight_decay) = 0.01;                   ///< weight decay, >= 0
  TORCH_ARG(double, min_trust_ratio) = 0.0;                 ///< trust ratio's lower bound, >= 0
  /// Upper bound of the trust ratio, at least `min_trust_ratio`. `nullopt` (default) sets no bound.
  TORCH_ARG(std::optional<double>, max_trust_ratio) = std::nullopt;
  TORCH_ARG(bool, bias_correction) = true;  ///< divide the moments by 1 - beta^step
  TORCH_ARG(bool, adam_w_mode) = true;      ///< decoupled decay; false: L2
  TORCH_ARG(bool, grad_averaging) = true;   ///< weight gradients by 1 - betas[0]; false: by 1
  TORCH_ARG(bool, use_nvlamb) = false;      ///< use the trust ratio even if weight_decay is 0
  TORCH_ARG(bool, maximize) = false;        ///< ascend instead of descend
  /// Dtype of exp_avg. `nullopt` (default) means `state_dtype`.
  TORCH_ARG(std::optional<at::ScalarType>, exp_avg_dtype) = std::nullopt;
  /// Dtype of exp_avg_sq. `nullopt` (default) means `state_dtype`.
  TORCH_ARG(std::optional<at::ScalarType>, exp_avg_sq_dtype) = std::nullopt;
};

/// Per-parameter state, with names from torch.optim.Adam.
struct TORCHFUSE_API FusedLAMBParamState
    : public FusedParamStateOf<FusedLAMBParamState, FusedLAMBOptions> {
  TORCH_ARG(torch::Tensor, exp_avg) = {};     ///< moving average of gradients
  TORCH_ARG(torch::Tensor, exp_avg_sq) = {};  ///< moving average of squared gradients
};

extern template struct FusedOptionsOf<FusedLAMBOptions>;
extern template struct FusedParamStateOf<FusedLAMBParamState, FusedLAMBOptions>;
extern template class FusedOptimizerOf<FusedLAMBOptions, FusedLAMBParamState>;

/// LAMB in fused passes; see torchfuse::fused_lamb_() for the formula. Moments are fp32 for fp16
/// and bf16 parameters, unless the dtype options are set.
///
///     using torchfuse::optim::FusedLAMB;
///     using torchfuse::optim::FusedLAMBOptions;
///     FusedLAMB optimizer(model->parameters(), FusedLAMBOptions(1e-3).max_grad_norm(1.0));
///
/// @throws c10::Error for options out of range, naming the option and the group.
class TORCHFUSE_API FusedLAMB : public FusedOptimizerOf<FusedLAMBOptions, FusedLAMBParamState> {
 public:
  using FusedOptimizerOf::FusedOptimizerOf;
};

}  // namespace torchfuse::optim
