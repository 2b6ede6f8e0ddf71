// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/optim/serialize.h>

#include <cstddef>
#include <cstdint>
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
  using betas_t = std::tuple<double, double>;  ///< as in torch::optim::AdamOptions

  /// Converts from the learning rate, as torch's options.
  // NOLINTNEXTLINE(google-explicit-constructor)
  FusedAdamOptions(double lr = 1e-3);

  TORCH_ARG(double, lr) = 1e-3;                             ///< learning rate, >= 0
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);  ///< moment decay rates, in [0, 1)
  TORCH_ARG(double, eps) = 1e-8;                            ///< added to the denominator, >= 0
  TORCH_ARG(double, weight_decay) = 0.0;                    ///< >= 0
  TORCH_ARG(bool, bias_correction) = true;                  ///< divide the moments by 1 - beta^step
  TORCH_ARG(bool, adam_w_mode) = true;      ///< decoupled decay; false: L2, as torch::optim::Adam
  TORCH_ARG(bool, amsgrad) = false;         ///< running maximum of the second moment
  TORCH_ARG(bool, maximize) = false;        ///< ascend instead of descend
  TORCH_ARG(bool, master_weights) = false;  ///< fp32 masters for fp16 and bf16 parameters
  /// Clip the global norm of the unscaled gradients inside the step. Optimizer-wide.
  TORCH_ARG(std::optional<double>, max_grad_norm) = std::nullopt;
  /// Leave unscaled and clipped gradients in .grad(). Optimizer-wide.
  TORCH_ARG(bool, write_back_grads) = false;
  /// Skip steps with non-finite gradients, with or without a scaler. Optimizer-wide.
  TORCH_ARG(bool, skip_non_finite) = false;
  /// Dtype of all moments: kFloat, kBFloat16 or kHalf, whatever the parameter's own; kDouble for
  /// kDouble. None: fp32 for 16-bit parameters, else the parameter's.
  TORCH_ARG(std::optional<at::ScalarType>, state_dtype) = std::nullopt;
  /// Of exp_avg alone; none: as state_dtype.
  TORCH_ARG(std::optional<at::ScalarType>, exp_avg_dtype) = std::nullopt;
  /// Of exp_avg_sq and max_exp_avg_sq; none: as state_dtype.
  TORCH_ARG(std::optional<at::ScalarType>, exp_avg_sq_dtype) = std::nullopt;
  /// Keep of bf16 parameters' masters only the 16 bits that the parameters lack: see
  /// master_of_remainder(). Needs master_weights.
  TORCH_ARG(bool, store_param_remainders) = false;
  /// Round bf16 parameters without masters at random, without bias, instead of to nearest.
  TORCH_ARG(bool, stochastic_rounding) = false;
  /// Of those random bits, >= 0; they also depend on the parameter's place among all groups, its
  /// step count and the element, and on nothing else. Optimizer-wide.
  TORCH_ARG(int64_t, seed) = 0;

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
struct TORCHFUSE_API FusedAdamParamState
    : public torch::optim::OptimizerCloneableParamState<FusedAdamParamState> {
  TORCH_ARG(torch::Tensor, step) = {};             ///< 0-dim fp32 view into the optimizer's buffer
  TORCH_ARG(torch::Tensor, exp_avg) = {};          ///< decaying mean of the gradients
  TORCH_ARG(torch::Tensor, exp_avg_sq) = {};       ///< decaying mean of their squares
  TORCH_ARG(torch::Tensor, max_exp_avg_sq) = {};   ///< with amsgrad only
  TORCH_ARG(torch::Tensor, master_param) = {};     ///< with master_weights, for 16-bit parameters
  TORCH_ARG(torch::Tensor, param_remainder) = {};  ///< in its place: store_param_remainders, bf16

 public:
  /// Reads the tensors that the archive holds; the others become undefined.
  void serialize(torch::serialize::InputArchive& archive) override;
  /// Writes every tensor that is defined under its name.
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

extern template class FusedOptimizerOf<FusedAdamOptions, FusedAdamParamState>;

/// Adam and AdamW in one fused pass; see torchfuse::fused_adam_() for the formula. Moments
/// are fp32 for fp16 and bf16 parameters, unless the options say otherwise.
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
