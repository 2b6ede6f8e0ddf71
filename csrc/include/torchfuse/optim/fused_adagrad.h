// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>

#include <optional>
#include <string>

#include <torchfuse/export.h>
#include <torchfuse/optim/fused_optimizer.h>

namespace torchfuse::optim {

/// Hyper-parameters of FusedAdagrad; names and defaults as torch::optim::Adagrad and
/// apex.optimizers.FusedAdagrad.
///
/// A parameter group without options of its own gets the optimizer's; one with options uses them as
/// they are.
struct TORCHFUSE_API FusedAdagradOptions
    : public torch::optim::OptimizerCloneableOptions<FusedAdagradOptions> {
  /// Converts from the learning rate, as torch's options.
  // NOLINTNEXTLINE(google-explicit-constructor)
  FusedAdagradOptions(double lr = 1e-2);

  TORCH_ARG(double, lr) = 1e-2;                        ///< learning rate, >= 0
  TORCH_ARG(double, lr_decay) = 0.0;                   ///< lr / (1 + (step - 1) lr_decay), >= 0
  TORCH_ARG(double, eps) = 1e-10;                      ///< added to the denominator, >= 0
  TORCH_ARG(double, weight_decay) = 0.0;               ///< >= 0
  TORCH_ARG(double, initial_accumulator_value) = 0.0;  ///< what sums begin with, >= 0
  TORCH_ARG(bool,
            adagrad_w_mode) = false;  ///< decoupled decay; false: L2, as torch::optim::Adagrad
  TORCH_ARG(bool, maximize) = false;  ///< ascend instead of descend
  TORCH_ARG(bool, master_weights) = false;  ///< fp32 masters for fp16 and bf16 parameters
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

/// State of one parameter; names as torch.optim.Adagrad.
struct TORCHFUSE_API FusedAdagradParamState
    : public torch::optim::OptimizerCloneableParamState<FusedAdagradParamState> {
  TORCH_ARG(torch::Tensor, step) = {};          ///< 0-dim fp32 view into the optimizer's buffer
  TORCH_ARG(torch::Tensor, sum) = {};           ///< sum of the gradients' squares
  TORCH_ARG(torch::Tensor, master_param) = {};  ///< with master_weights, for 16-bit parameters

 public:
  /// Reads the tensors that the archive holds; the others become undefined.
  void serialize(torch::serialize::InputArchive& archive) override;
  /// Writes every tensor that is defined under its name.
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

extern template class FusedOptimizerOf<FusedAdagradOptions, FusedAdagradParamState>;

/// Adagrad in one fused pass; see torchfuse::fused_adagrad_() for the formula. Sums are fp32 for
/// fp16 and bf16 parameters.
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
