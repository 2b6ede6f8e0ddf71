// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/arg.h>
#include <torch/types.h>

#include <optional>
#include <string>
#include <tuple>

#include <torchfuse/export.h>
#include <torchfuse/optim/fused_optimizer.h>
#include <torchfuse/optim/fused_options.h>

namespace torchfuse::optim {

/// Hyper-parameters of FusedLAMB; names and defaults as apex.optimizers.FusedLAMB, so that
/// max_grad_norm is 1.
struct TORCHFUSE_API FusedLAMBOptions : public FusedOptionsOf<FusedLAMBOptions> {
  using betas_t = std::tuple<double, double>;  ///< as in torch::optim::AdamOptions

  /// Converts from the learning rate, as torch's options.
  // NOLINTNEXTLINE(google-explicit-constructor)
  FusedLAMBOptions(double lr = 1e-3) : FusedOptionsOf(lr) { max_grad_norm(1.0); }

  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);  ///< moment decay rates, in [0, 1)
  TORCH_ARG(double, eps) = 1e-6;                            ///< added to the denominator, >= 0
  TORCH_ARG(double, weight_decay) = 0.01;                   ///< >= 0
  TORCH_ARG(double, min_trust_ratio) = 0.0;                 ///< >= 0
  /// Not below min_trust_ratio; none: no limit.
  TORCH_ARG(std::optional<double>, max_trust_ratio) = std::nullopt;
  TORCH_ARG(bool, bias_correction) = true;  ///< divide the moments by 1 - beta^step
  TORCH_ARG(bool, adam_w_mode) = true;      ///< decoupled decay; false: L2
  TORCH_ARG(bool, grad_averaging) = true;   ///< the gradient enters with 1 - beta1; false: with 1
  TORCH_ARG(bool, use_nvlamb) = false;      ///< trust ratio without weight decay too
  TORCH_ARG(bool, maximize) = false;        ///< ascend instead of descend
  /// Of exp_avg alone; none: as state_dtype.
  TORCH_ARG(std::optional<at::ScalarType>, exp_avg_dtype) = std::nullopt;
  /// Of exp_avg_sq; none: as state_dtype.
  TORCH_ARG(std::optional<at::ScalarType>, exp_avg_sq_dtype) = std::nullopt;
};

/// State of one parameter; names as torch.optim.Adam.
struct TORCHFUSE_API FusedLAMBParamState
    : public FusedParamStateOf<FusedLAMBParamState, FusedLAMBOptions> {
  TORCH_ARG(torch::Tensor, exp_avg) = {};     ///< decaying mean of the gradients
  TORCH_ARG(torch::Tensor, exp_avg_sq) = {};  ///< decaying mean of their squares
};

extern template struct FusedOptionsOf<FusedLAMBOptions>;
extern template struct FusedParamStateOf<FusedLAMBParamState, FusedLAMBOptions>;
extern template class FusedOptimizerOf<FusedLAMBOptions, FusedLAMBParamState>;

/// LAMB; see torchfuse::fused_lamb_() for the formula. Moments are fp32 for fp16 and bf16
/// parameters, unless the options say otherwise.
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
