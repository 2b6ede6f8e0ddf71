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

/// Hyper-parameters of FusedAdam; names and defaults as apex.optimizers.FusedAdam.
///
/// A parameter group without options of its own gets the optimizer's; one with options uses them as
/// they are.
struct TORCHFUSE_API FusedAdamOptions
    : public torch::optim::OptimizerCloneableOptions<FusedAdamOptions> {
  using betas_t = std::tuple<double, double>;

  // NOLINTNEXTLINE(google-explicit-constructor): torch's options convert from the learning rate.
  FusedAdamOptions(double lr = 1e-3);

  TORCH_ARG(double, lr) = 1e-3;                             ///< learning rate, >= 0
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);  ///< moment decay rates, in [0, 1)
  TORCH_ARG(double, eps) = 1e-8;                            ///< added to the denominator, >= 0
  TORCH_ARG(double, weight_decay) = 0.0;                    ///< >= 0
  TORCH_ARG(bool, bias_correction) = true;                  ///< divide the moments by 1 - beta^step
  TORCH_ARG(bool, adam_w_mode) = true;  ///< decoupled decay; false: L2, as torch::optim::Adam
  TORCH_ARG(bool, amsgrad) = false;
  TORCH_ARG(bool, maximize) = false;
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
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;
  void set_lr(double lr) override;
};

/// State of one parameter; names as torch.optim.Adam.
struct TORCHFUSE_API FusedAdamParamState
    : public torch::optim::OptimizerCloneableParamState<FusedAdamParamState> {
  TORCH_ARG(torch::Tensor, step) = {};            ///< 0-dim fp32 view into the optimizer's buffer
  TORCH_ARG(torch::Tensor, exp_avg) = {};         ///< decaying mean of the gradients
  TORCH_ARG(torch::Tensor, exp_avg_sq) = {};      ///< decaying mean of their squares
  TORCH_ARG(torch::Tensor, max_exp_avg_sq) = {};  ///< with amsgrad only
  TORCH_ARG(torch::Tensor, master_param) = {};    ///< with master_weights, for 16-bit parameters

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// Adam and AdamW in one fused pass; see torchfuse::fused_adam_ in ops.h for the formula. Moments
/// are fp32 for fp16 and bf16 parameters.
///
///     using torchfuse::optim::FusedAdam;
///     using torchfuse::optim::FusedAdamOptions;
///     FusedAdam optimizer(model->parameters(), FusedAdamOptions(1e-3).weight_decay(0.01));
///
/// @throws c10::Error for options out of range, naming the option and the group.
class TORCHFUSE_API FusedAdam : public FusedOptimizer {
 public:
  explicit FusedAdam(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                     FusedAdamOptions defaults = {});
  explicit FusedAdam(std::vector<torch::Tensor> params, FusedAdamOptions defaults = {});

  /// Options and states in the order of the groups' parameters.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Checks everything the archive holds before any of it replaces the optimizer's own. The
  /// optimizer-wide options of the archive become the defaults' too.
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  const char* name() const override;
  const char* algorithm() const override;
  void check_options(const torch::optim::OptimizerOptions& options,
                     std::optional<std::size_t> group) const override;
  std::vector<HyperParam> hyper_params(
      const torch::optim::OptimizerOptions& options) const override;
  FusedStepOptions step_options() const override;
  FusedSlot make_slot(const at::Tensor& param, const torch::optim::OptimizerParamState* state,
                      const torch::optim::OptimizerOptions& options) const override;
  void store_slot(const FusedSlot& slot) override;
  bool slot_is_current(const FusedSlot& slot, const torch::optim::OptimizerParamState& state,
                       const torch::optim::OptimizerOptions& options) const override;
};

}  // namespace torchfuse::optim
