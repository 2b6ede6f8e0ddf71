// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>

#include <optional>
#include <string>

#include <torchfuse/export.h>
#include <torchfuse/optim/fused_optimizer.h>

namespace torchfuse::optim {

/// Hyper-parameters of FusedSGD; names as torch::optim::SGD and apex.optimizers.FusedSGD.
///
/// A parameter group without options of its own gets the optimizer's; one with options uses them as
/// they are.
struct TORCHFUSE_API FusedSGDOptions
    : public torch::optim::OptimizerCloneableOptions<FusedSGDOptions> {
  /// Converts from the learning rate, as torch's options.
  // NOLINTNEXTLINE(google-explicit-constructor)
  FusedSGDOptions(double lr = 1e-3);

  TORCH_ARG(double, lr) = 1e-3;                ///< learning rate, >= 0
  TORCH_ARG(double, momentum) = 0.0;           ///< decay rate of the buffer, >= 0; 0: no buffer
  TORCH_ARG(double, dampening) = 0.0;          ///< takes this share from the gradient, >= 0
  TORCH_ARG(double, weight_decay) = 0.0;       ///< L2 regularisation, >= 0
  TORCH_ARG(bool, nesterov) = false;           ///< needs a momentum, and no dampening
  TORCH_ARG(bool, wd_after_momentum) = false;  ///< decay behind the momentum instead of before it
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

/// State of one parameter; names as torch.optim.SGD.
struct TORCHFUSE_API FusedSGDParamState
    : public torch::optim::OptimizerCloneableParamState<FusedSGDParamState> {
  TORCH_ARG(torch::Tensor, step) = {};             ///< 0-dim fp32 view into the optimizer's buffer
  TORCH_ARG(torch::Tensor, momentum_buffer) = {};  ///< with momentum only
  TORCH_ARG(torch::Tensor, master_param) = {};     ///< with master_weights, for 16-bit parameters

 public:
  /// Reads the tensors that the archive holds; the others become undefined.
  void serialize(torch::serialize::InputArchive& archive) override;
  /// Writes every tensor that is defined under its name.
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

extern template class FusedOptimizerOf<FusedSGDOptions, FusedSGDParamState>;

/// SGD with momentum in one fused pass; see torchfuse::fused_sgd_() for the formula. The buffer is
/// fp32 for fp16 and bf16 parameters, and there is none while the momentum is 0. `step` starts over
/// with a buffer that is made later, whose first update takes the whole gradient.
///
///     using torchfuse::optim::FusedSGD;
///     using torchfuse::optim::FusedSGDOptions;
///     FusedSGD optimizer(model->parameters(), FusedSGDOptions(0.1).momentum(0.9).nesterov(true));
///
/// @throws c10::Error for options out of range, naming the option and the group.
class TORCHFUSE_API FusedSGD : public FusedOptimizerOf<FusedSGDOptions, FusedSGDParamState> {
 public:
  using FusedOptimizerOf::FusedOptimizerOf;
};

}  // namespace torchfuse::optim
