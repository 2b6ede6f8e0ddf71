// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include <torchfuse/export.h>
#include <torchfuse/write_back_grads.h>

/// TORCH_ARG for a base class: the setter returns the derived class, `Self`.
#define TORCHFUSE_ARG(T, name)                             \
 public:                                                   \
  Self& name(T value) {                                    \
    name##_ = std::move(value);                            \
    return static_cast<Self&>(*this);                      \
  }                                                        \
  const T& name() const noexcept { return this->name##_; } \
  T& name() noexcept { return this->name##_; }             \
                                                           \
 private:                                                  \
  T name##_

namespace torchfuse::optim {

/// Options that all fused optimizers share. `Self` is the struct that adds the optimizer's own.
///
/// A parameter group without options of its own gets the optimizer's; a group with options uses
/// them unchanged. Optimizer-wide options must be the same in all groups.
template <class Self>
struct TORCHFUSE_API FusedOptionsOf : public torch::optim::OptimizerCloneableOptions<Self> {
  TORCHFUSE_ARG(double, lr) = 0.0;              ///< learning rate, >= 0
  TORCHFUSE_ARG(bool, master_weights) = false;  ///< fp32 masters for fp16 and bf16 parameters
  /// Clip the global norm of the unscaled gradients inside the step; none: no clipping.
  /// Optimizer-wide.
  TORCHFUSE_ARG(std::optional<double>, max_grad_norm) = std::nullopt;
  /// Skip steps whose norm is greater, as skips for non-finite gradients, which leave scales as
  /// they are. A NaN norm skips nothing. None: skip none. Optimizer-wide. For a threshold on the
  /// device see FusedOptimizer::set_skip_norm_above().
  TORCHFUSE_ARG(std::optional<double>, skip_norm_above) = std::nullopt;
  /// Store the unscaled (kUnscaled) or the unscaled and clipped gradients (kClipped, or true) in
  /// .grad(). Optimizer-wide.
  TORCHFUSE_ARG(WriteBackGrads, write_back_grads) = WriteBackGrads::kNothing;
  /// Skip steps with non-finite gradients, with or without a scaler. Optimizer-wide.
  TORCHFUSE_ARG(bool, skip_non_finite) = false;
  /// Dtype of all states: kFloat, kBFloat16 or kHalf for any parameter but a kDouble one, which
  /// requires kDouble. None: fp32 for 16-bit parameters, else the parameter's dtype.
  TORCHFUSE_ARG(std::optional<at::ScalarType>, state_dtype) = std::nullopt;
  /// Store masters of bf16 parameters as int16 remainders, the 16 bits that the parameters lack:
  /// see master_of_remainder(). Requires master_weights.
  TORCHFUSE_ARG(bool, store_param_remainders) = false;
  /// Round bf16 parameters stochastically, without bias, not to nearest. Excludes master_weights.
  TORCHFUSE_ARG(bool, stochastic_rounding) = false;
  /// Seed of stochastic rounding, >= 0. The random bits depend only on the seed, the parameter's
  /// index among all groups, its step count and the element in the whole parameter. Optimizer-wide.
  TORCHFUSE_ARG(std::int64_t, seed) = 0;
  /// Decay of exponential moving averages of the parameters, in [0, 1), which steps move: see
  /// EmaOptions. None: no averages. Optimizer-wide, as the two options below.
  TORCHFUSE_ARG(std::optional<double>, ema_decay) = std::nullopt;
  TORCHFUSE_ARG(bool, ema_warmup) = false;          ///< as EmaOptions::warmup
  TORCHFUSE_ARG(std::int64_t, ema_start_step) = 0;  ///< as EmaOptions::start_step, >= 0

 public:
  /// Throws, naming `owner` and the option, if a value is out of range.
  virtual void check(const std::string& owner) const;

  /// Reads the options. Options of a later version than the archive's get their defaults.
  /// @throws c10::Error if the archive lacks another option; `*this` stays unchanged.
  void serialize(torch::serialize::InputArchive& archive) override;
  /// Writes every option under its name.
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;   ///< learning rate, for torch's schedulers
  void set_lr(double lr) override;  ///< sets the learning rate, for torch's schedulers
  /// Compares all options.
  friend bool operator==(const Self& lhs, const Self& rhs) { return lhs.equals(rhs); }

 protected:
  /// Constructs options with the default learning rate of the derived class.
  explicit FusedOptionsOf(double lr) : lr_(lr) {}

 private:
  bool equals(const Self& other) const;
};

/// State of one parameter that all fused optimizers share. `Self` is the struct that adds the
/// optimizer's own states, and `Options` are the optimizer's options.
template <class Self, class Options>
struct TORCHFUSE_API FusedParamStateOf : public torch::optim::OptimizerCloneableParamState<Self> {
  TORCHFUSE_ARG(torch::Tensor, step) = {};          ///< step count, 0-dim fp32 view into a buffer
  TORCHFUSE_ARG(torch::Tensor, master_param) = {};  ///< fp32 master of a 16-bit parameter, or none
  /// int16 remainder that replaces master_param for bf16 parameters with store_param_remainders.
  TORCHFUSE_ARG(torch::Tensor, param_remainder) = {};
  /// Average of the parameter with ema_decay: fp64 for an fp64 parameter, else fp32.
  TORCHFUSE_ARG(torch::Tensor, ema_param) = {};

 public:
  /// Reads the tensors that the archive holds; the others become undefined.
  void serialize(torch::serialize::InputArchive& archive) override;
  /// Writes every tensor that is defined under its name.
  void serialize(torch::serialize::OutputArchive& archive) const override;
  /// Compares all tensors: which are defined, their dtypes, shapes and elements.
  friend bool operator==(const Self& lhs, const Self& rhs) { return lhs.equals(rhs); }

 private:
  bool equals(const Self& other) const;
};

}  // namespace torchfuse::optim

#undef TORCHFUSE_ARG
