// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>

#include <cstddef>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <torchfuse/export.h>
#include <torchfuse/optim/fused_optimizer.h>

namespace torchfuse::optim {

/// Hyper-parameters of FusedLAMB; names and defaults as apex.optimizers.FusedLAMB.
///
/// A parameter group without options of its own gets the optimizer's; one with options uses them as
/// they are.
struct TORCHFUSE_API FusedLAMBOptions
    : public torch::optim::OptimizerCloneableOptions<FusedLAMBOptions> {
  using betas_t = std::tuple<double, double>;  ///< as in torch::optim::AdamOptions

  /// Converts from the learning rate, as torch's options.
  // NOLINTNEXTLINE(google-explicit-constructor)
  FusedLAMBOptions(double lr = 1e-3);

  TORCH_ARG(double, lr) = 1e-3;                             ///< learning rate, >= 0
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
  TORCH_ARG(bool, master_weights) = false;  ///< fp32 masters for fp16 and bf16 parameters
  /// Clip the global norm of the unscaled gradients inside the step; none: no clipping.
  /// Optimizer-wide.
  TORCH_ARG(std::optional<double>, max_grad_norm) = 1.0;
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

/// State of one parameter; names as torch.optim.Adam.
struct TORCHFUSE_API FusedLAMBParamState
    : public torch::optim::OptimizerCloneableParamState<FusedLAMBParamState> {
  TORCH_ARG(torch::Tensor, step) = {};          ///< 0-dim fp32 view into the optimizer's buffer
  TORCH_ARG(torch::Tensor, exp_avg) = {};       ///< decaying mean of the gradients
  TORCH_ARG(torch::Tensor, exp_avg_sq) = {};    ///< decaying mean of their squares
  TORCH_ARG(torch::Tensor, master_param) = {};  ///< with master_weights, for 16-bit parameters

 public:
  /// Reads the tensors that the archive holds; the others become undefined.
  void serialize(torch::serialize::InputArchive& archive) override;
  /// Writes every tensor that is defined under its name.
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

extern template class FusedOptimizerOf<FusedLAMBOptions, FusedLAMBParamState>;

/// LAMB; see torchfuse::fused_lamb_() for the formula. Moments are fp32 for fp16 and bf16
/// parameters.
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
