// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include <torchfuse/export.h>

/// As TORCH_ARG, for a base class: what sets the value returns the class itself, `Self`.
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

/// The options that all fused optimizers share. `Self` is the struct that adds the optimizer's own.
///
/// A parameter group without options of its own gets the optimizer's; one with options uses them as
/// they are. Optimizer-wide options must be the same in all groups.
template <class Self>
struct TORCHFUSE_API FusedOptionsOf : public torch::optim::OptimizerCloneableOptions<Self> {
  TORCHFUSE_ARG(double, lr) = 0.0;              ///< learning rate, >= 0
  TORCHFUSE_ARG(bool, master_weights) = false;  ///< fp32 masters for fp16 and bf16 parameters
  /// Clip the global norm of the unscaled gradients inside the step; none: no clipping.
  /// Optimizer-wide.
  TORCHFUSE_ARG(std::optional<double>, max_grad_norm) = std::nullopt;
  /// Leave unscaled and clipped gradients in .grad(). Optimizer-wide.
  TORCHFUSE_ARG(bool, write_back_grads) = false;
  /// Skip steps with non-finite gradients, with or without a scaler. Optimizer-wide.
  TORCHFUSE_ARG(bool, skip_non_finite) = false;
  /// Dtype of all states: kFloat, kBFloat16 or kHalf, whatever the parameter's own; kDouble for
  /// kDouble. None: fp32 for 16-bit parameters, else the parameter's.
  TORCHFUSE_ARG(std::optional<at::ScalarType>, state_dtype) = std::nullopt;
  /// Keep of bf16 parameters' masters only the 16 bits that the parameters lack: see
  /// master_of_remainder(). Needs master_weights.
  TORCHFUSE_ARG(bool, store_param_remainders) = false;
  /// Round bf16 parameters without masters at random, without bias, instead of to nearest.
  TORCHFUSE_ARG(bool, stochastic_rounding) = false;
  /// Of those random bits, >= 0; they also depend on the parameter's place among all groups, its
  /// step count and the element, and on nothing else. Optimizer-wide.
  TORCHFUSE_ARG(std::int64_t, seed) = 0;

 public:
  /// Throws, naming `owner` and the option, if a value is out of range.
  virtual void check(const std::string& owner) const;

  /// Options of a later version than the archive's get their defaults.
  /// @throws c10::Error if the archive lacks another option; `*this` stays as it was.
  void serialize(torch::serialize::InputArchive& archive) override;
  /// Writes every option under its name.
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override;   ///< for torch's schedulers
  void set_lr(double lr) override;  ///< for torch's schedulers

 protected:
  /// With the class's own default.
  explicit FusedOptionsOf(double lr) : lr_(lr) {}
};

/// The state of one parameter that all fused optimizers share. `Self` is the struct that adds the
/// optimizer's own, and `Options` are its options.
template <class Self, class Options>
struct TORCHFUSE_API FusedParamStateOf : public torch::optim::OptimizerCloneableParamState<Self> {
  TORCHFUSE_ARG(torch::Tensor, step) = {};          ///< 0-dim fp32 view into the optimizer's buffer
  TORCHFUSE_ARG(torch::Tensor, master_param) = {};  ///< with master_weights, 16-bit parameters
  /// In its place: with store_param_remainders, for bf16 parameters.
  TORCHFUSE_ARG(torch::Tensor, param_remainder) = {};

 public:
  /// Reads the tensors that the archive holds; the others become undefined.
  void serialize(torch::serialize::InputArchive& archive) override;
  /// Writes every tensor that is defined under its name.
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

}  // namespace torchfuse::optim

#undef TORCHFUSE_ARG
