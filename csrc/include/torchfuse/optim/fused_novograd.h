// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include <torchfuse/export.h>
#include <torchfuse/optim/fused_optimizer.h>

namespace torchfuse::optim {

/// Hyper-parameters of FusedNovoGrad; names as apex.optimizers.FusedNovoGrad.
///
/// A parameter group without options of its own gets the optimizer's; one with options uses them as
/// they are.
struct TORCHFUSE_API FusedNovoGradOptions
    : public torch::optim::OptimizerCloneableOptions<FusedNovoGradOptions> {
  using betas_t = std::tuple<double, double>;  ///< as in torch::optim::AdamOptions

  /// Converts from the learning rate, as torch's options.
  // NOLINTNEXTLINE(google-explicit-constructor)
  FusedNovoGradOptions(double lr = 1e-3);

  TORCH_ARG(double, lr) = 1e-3;                             ///< learning rate, >= 0
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);  ///< decay rates, in [0, 1)
  TORCH_ARG(double, eps) = 1e-8;                            ///< added to the denominator, >= 0
  TORCH_ARG(double, weight_decay) = 0.0;                    ///< >= 0
  TORCH_ARG(bool, bias_correction) = true;                  ///< divide by the terms in beta^step
  TORCH_ARG(bool, reg_inside_moment) = false;  ///< normalize and decay before the moment
  TORCH_ARG(bool, grad_averaging) = true;      ///< gradients enter with 1 - betas[0], else with 1
  TORCH_ARG(std::int64_t, norm_type) = 2;      ///< 2, or 0 for the largest magnitude
  TORCH_ARG(bool, init_zero) = false;          ///< begin with a norm of 0, not the first gradient's
  TORCH_ARG(bool, maximize) = false;           ///< ascend instead of descend
  TORCH_ARG(bool, master_weights) = false;     ///< fp32 masters for fp16 and bf16 parameters
  /// Clip the global norm of the unscaled gradients inside the step. Optimizer-wide.
  TORCH_ARG(std::optional<double>, max_grad_norm) = std::nullopt;
  /// Leave unscaled and clipped gradients in .grad(). Optimizer-wide.
  TORCH_ARG(bool, write_back_grads) = false;
  /// Skip steps with non-finite gradients, with or without a scaler. Optimizer-wide.
  TORCH_ARG(bool, skip_non_finite) = false;

 public:
  /// Throws, naming `owner` and the option, if a value is out of range.
  void check(const std::string& owner) const;

  /// @throws c10::Error if the archive lacks an option; `*this` stays as it was.
  void serialize(torch::serialize::InputArchive& archive) override;
  /// Writes every option under its name.
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;   ///< for torch's schedulers
  void set_lr(double lr) override;  ///< for torch's schedulers
};

/// State of one parameter.
struct TORCHFUSE_API FusedNovoGradParamState
    : public torch::optim::OptimizerCloneableParamState<FusedNovoGradParamState> {
  TORCH_ARG(torch::Tensor, step) = {};     ///< 0-dim fp32 view into the optimizer's buffer
  TORCH_ARG(torch::Tensor, exp_avg) = {};  ///< decaying mean of the gradients
  /// 0-dim: running norm of the gradient, not its square; fp64 for fp64 parameters, else fp32.
  TORCH_ARG(torch::Tensor, exp_avg_norm) = {};
  TORCH_ARG(torch::Tensor, master_param) = {};  ///< with master_weights, for 16-bit parameters

 public:
  /// Reads the tensors that the archive holds; the others become undefined.
  void serialize(torch::serialize::InputArchive& archive) override;
  /// Writes every tensor that is defined under its name.
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

extern template class FusedOptimizerOf<FusedNovoGradOptions, FusedNovoGradParamState>;

/// NovoGrad in two fused passes, with one running norm for each tensor; see
/// torchfuse::fused_novograd_() for the formula. Moments are fp32 for fp16 and bf16 parameters.
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
