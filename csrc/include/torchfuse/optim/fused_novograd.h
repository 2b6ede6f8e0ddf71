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

/// Hyper-parameters of FusedNovoGrad, with the names of apex.optimizers.FusedNovoGrad.
struct TORCHFUSE_API FusedNovoGradOptions : public FusedOptionsOf<FusedNovoGradOptions> {
  using betas_t = std::tuple<double, double>;  ///< as in torch::optim::AdamOptions

  /// Converts a learning rate to options, as torch's options do.
  // NOLINTNEXTLINE(google-explicit-constructor)
  FusedNovoGradOptions(double lr = 1e-3) : FusedOptionsOf(lr) {}

  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);  ///< decay rates, in [0, 1)
  TORCH_ARG(double, eps) = 1e-8;                            ///< added to the denominator, >= 0
  TORCH_ARG(double, weight_decay) = 0.0;                    ///< weight decay, >= 0
  TORCH_ARG(bool, bias_correction) = true;                  ///< correct moments and norms for bias
  TORCH_ARG(bool, reg_inside_moment) = false;  ///< normalize and decay before the moment
  TORCH_ARG(bool, grad_averaging) = true;      ///< weight gradients by 1 - betas[0]; false: by 1
  TORCH_ARG(std::int64_t, norm_type) = 2;      ///< 2: L2 norm; 0: largest magnitude
  TORCH_ARG(bool, init_zero) = false;          ///< start with norm 0, not the first gradient's
  TORCH_ARG(bool, maximize) = false;           ///< ascend instead of descend
  /// Dtype of exp_avg. None: `state_dtype`.
  TORCH_ARG(std::optional<at::ScalarType>, exp_avg_dtype) = std::nullopt;
};

/// State of one parameter.
struct TORCHFUSE_API FusedNovoGradParamState
    : public FusedParamStateOf<FusedNovoGradParamState, FusedNovoGradOptions> {
  TORCH_ARG(torch::Tensor, exp_avg) = {};  ///< decaying mean of the gradients
  /// 0-dim: running norm of the gradient, not its square; fp64 for fp64 parameters, else fp32.
  TORCH_ARG(torch::Tensor, exp_avg_norm) = {};
};

extern template struct FusedOptionsOf<FusedNovoGradOptions>;
extern template struct FusedParamStateOf<FusedNovoGradParamState, FusedNovoGradOptions>;
extern template class FusedOptimizerOf<FusedNovoGradOptions, FusedNovoGradParamState>;

/// NovoGrad in two fused passes, with one running norm for each tensor; see
/// torchfuse::fused_novograd_() for the formula. Moments are fp32 for fp16 and bf16 parameters,
/// unless the dtype options are set, which do not apply to the norms.
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
