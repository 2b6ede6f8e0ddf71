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

/// Like TORCH_ARG, but the setter returns the derived class, `Self`.
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

/// Options that all fused optimizers share. `Self` is the optimizer's derived struct.
///
/// A parameter group without options gets the optimizer's defaults. A group with options keeps
/// its options unchanged. Optimizer-wide options must be equal in all groups.
template <class Self>
struct TORCHFUSE_API FusedOptionsOf : public torch::optim::OptimizerCloneableOptions<Self> {
  TORCHFUSE_ARG(double, lr) = 0.0;              ///< learning rate, >= 0
  TORCHFUSE_ARG(bool, master_weights) = false;  ///< fp32 masters for fp16 and bf16 parameters
  /// Maximum global L2 norm for the unscaled gradients, >= 0, to which the step clips. `nullopt`
  /// disables clipping. Optimizer-wide.
  TORCHFUSE_ARG(std::optional<double>, max_grad_norm) = std::nullopt;
  /// Threshold, >= 0: a step whose global gradient norm is greater is skipped. Such a skip is not
  /// an overflow, so the loss scale does not change. A NaN norm skips nothing. `nullopt` (default)
  /// disables the check. Optimizer-wide. FusedOptimizer::set_skip_norm_above() sets a threshold on
  /// the device.
  TORCHFUSE_ARG(std::optional<double>, skip_norm_above) = std::nullopt;
  /// Gradients that the step stores in .grad(): unscaled (kUnscaled), or unscaled and clipped
  /// (kClipped, or true). By default .grad() stays unchanged. Optimizer-wide.
  TORCHFUSE_ARG(WriteBackGrads, write_back_grads) = WriteBackGrads::kNothing;
  /// Skips steps with non-finite gradients, with or without a scaler. Optimizer-wide.
  TORCHFUSE_ARG(bool, skip_non_finite) = false;
  /// Dtype of all states: kFloat, kBFloat16 or kHalf. kDouble parameters require
  /// kDouble; other parameters reject kDouble. `nullopt` (default) means the parameter's dtype, or
  /// fp32 for 16-bit parameters.
  TORCHFUSE_ARG(std::optional<at::ScalarType>, state_dtype) = std::nullopt;
  /// Stores masters of bf16 parameters as int16 remainders, which hold the 16 bits that bf16
  /// cannot hold; see master_of_remainder(). Requires master_weights.
  TORCHFUSE_ARG(bool, store_param_remainders) = false;
  /// Rounds bf16 parameters stochastically (unbiased) instead of to nearest. Excludes
  /// master_weights.
  TORCHFUSE_ARG(bool, stochastic_rounding) = false;
  /// Seed for stochastic rounding, >= 0. The random bits depend only on the seed, the parameter's
  /// index over all groups and step count, and the element's index in the unsharded parameter.
  /// Optimizer-wide.
  TORCHFUSE_ARG(std::int64_t, seed) = 0;
  /// Decay of the parameters' exponential moving averages, in [0, 1); see EmaOptions. `nullopt`
  /// (default) keeps no averages. Optimizer-wide, as are ema_warmup and ema_start_step.
  TORCHFUSE_ARG(std::optional<double>, ema_decay) = std::nullopt;
  TORCHFUSE_ARG(bool, ema_warmup) = false;          ///< see EmaOptions::warmup
  TORCHFUSE_ARG(std::int64_t, ema_start_step) = 0;  ///< see EmaOptions::start_step; >= 0

 public:
  /// Checks all values.
  /// @param owner the options' name in error messages.
  /// @throws c10::Error naming `owner` and the option if a value is out of range.
  virtual void check(const std::string& owner) const;

  /// Reads the options. Options that are newer than the archive get their defaults.
  /// @throws c10::Error if the archive lacks any other option; `*this` stays unchanged.
  void serialize(torch::serialize::InputArchive& archive) override;
  /// Writes every option under its name.
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;   ///< learning rate, for torch's schedulers
  void set_lr(double lr) override;  ///< sets the learning rate, for torch's schedulers
  /// Compares all options.
  friend bool operator==(const Self& lhs, const Self& rhs) { return lhs.equals(rhs); }

 protected:
  /// Constructs options with the derived class's default learning rate.
  explicit FusedOptionsOf(double lr) : lr_(lr) {}

 private:
  bool equals(const Self& other) const;
};

/// Per-parameter state that all fused optimizers share. `Self` is the optimizer's
/// derived struct, and `Options` are the optimizer's options.
template <class Self, class Options>
struct TORCHFUSE_API FusedParamStateOf : public torch::optim::OptimizerCloneableParamState<Self> {
  TORCHFUSE_ARG(torch::Tensor, step) = {};          ///< step count, 0-dim fp32 view of a buffer
  TORCHFUSE_ARG(torch::Tensor, master_param) = {};  ///< fp32 master of a 16-bit parameter
  /// int16 remainder that replaces master_param for bf16 parameters with store_param_remainders.
  TORCHFUSE_ARG(torch::Tensor, param_remainder) = {};
  /// The parameter's moving average if ema_decay is set: fp64 for an fp64 parameter, else fp32.
  TORCHFUSE_ARG(torch::Tensor, ema_param) = {};

 public:
  /// Reads the state's tensors. A tensor that the archive lacks becomes undefined.
  void serialize(torch::serialize::InputArchive& archive) override;
  /// Writes every defined tensor under its name.
  void serialize(torch::serialize::OutputArchive& archive) const override;
  /// Compares all tensors: dtypes, devices, shapes and elements. Undefined tensors are equal.
  friend bool operator==(const Self& lhs, const Self& rhs) { return lhs.equals(rhs); }

 private:
  bool equals(const Self& other) const;
};

}  // namespace torchfuse::optim

#undef TORCHFUSE_ARG
