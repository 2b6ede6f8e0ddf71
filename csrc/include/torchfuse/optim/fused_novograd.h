// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/arg.h>
#include <torch/types.h>

#include <cstdint>
#include <tuple>

#include <torchfuse/export.h>
#include <torchfuse/optim/fused_optimizer.h>
#include <torchfuse/optim/fused_options.h>

namespace torchfuse::optim {

/// FusedNovoGrad's hyper-parameters, with names from apex.optimizers.FusedNovoGrad.
struct TORCHFUSE_API FusedNovoGradOptions : public FusedOptionsOf<FusedNovoGradOptions> {
  using betas_t = std::tuple<double, double>;  ///< as in torch::optim::AdamOptions

  /// Converts a learning rate to options, as torch's options do.
  // NOLINTNEXTLINE(google-explicit-constructor)
  FusedNovoGradOptions(double lr = 1e-3) : FusedOptionsOf(lr) {}

  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);  ///< decay rates, in [0, 1)
  TORCH_ARG(double, eps) = 1e-8;                            ///< added to the denominator, >= 0
  TORCH_ARG(double, weight_decay) = 0.0;                    ///< weight decay, >= 0
  TORCH_ARG(bool, bias_correction) = true;     ///< divide moments and norms by the bias corrections
  TORCH_ARG(bool, reg_inside_moment) = false;  ///< normalize and decay before averaging
  TORCH_ARG(bool, grad_averaging) = true;      ///< weight gradients by 1 - betas[0]; false: by 1
  TORCH_ARG(std::int64_t, norm_type) = 2;      ///< 2: L2 norm; 0: maximum norm
  TORCH_ARG(bool, init_zero) = false;  ///< initialize exp_avg_norm to 0, not to the first norm
  TORCH_ARG(bool, maximize) = false;   ///< ascend instead of descend
  /// Dtype of exp_avg. `nullopt` (default) means `state_dtype`.
  TORCH_ARG(std::optional<at::ScalarType>, exp_avg_dtype) = std::nullopt;
};

/// Per-parameter state.
struct TORCHFUSE_API FusedNovoGradParamState
    : public FusedParamStateOf<FusedNovoGradParamState, FusedNovoGradOptions> {
  TORCH_ARG(torch::Tensor, exp_avg) = {};  ///< moving average of gradients
  /// Running gradient norm (not squared): 0-dim, fp64 for fp64 parameters, else fp32.
  TORCH_ARG(torch::Tensor, exp_avg_norm) = {};
};

extern template struct FusedOptionsOf<FusedNovoGradOptions>;
extern template struct FusedParamStateOf<FusedNovoGradParamState, FusedNovoGradOptions>;
extern template class FusedOptimizerOf<FusedNovoGradOptions, FusedNovoGradParamState>;

/// NovoGrad in two fused passes, with one running norm per parameter; see
/// torchfuse::fused_novograd_() for the formula. `exp_avg` is fp32 for fp16 and bf16 parameters,
/// unless the dtype options are set. The dtype options do not apply to the norms.
///
///     using torchfuse::optim::FusedNovoGrad;
///     using torchfuse::optim::FusedNovoGradOptions;
///     FusedNovoGrad optimizer(model->parameters(),
///                             FusedNovoGradOptions(1e-2).betas({0.95, 0.98}));
///
/// @throws c10::Error for options out of range, naming the option and the group.
class TORCHFUSE_API FusedNovoGrad
    : public FusedOptimizerOf<FusedNovoGradOptions, FusedNovoGradParamState> {
 public:
  using FusedOptimizerOf::FusedOptimizerOf;
};

}  // namespace torchfuse::optim
