// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Dict.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchfuse/export.h>
#include <torchfuse/fused_step.h>

namespace torchfuse {
class Checkpoint;
namespace amp {
class GradScaler;
}
namespace parallel {
class ShardedBase;
}
}  // namespace torchfuse

namespace torchfuse::optim {

/// Loss scaling of one step(). amp::GradScaler sets the request before step() and removes it after.
struct ScalingRequest {
  std::optional<at::Tensor> grad_scale;  ///< loss scale of the gradients
  std::optional<at::Tensor> found_inf;   ///< non-zero skips the step; `check` sets it on overflow
  bool check = false;                    ///< check for non-finite gradients inside the step
  bool found_inf_is_output = false;      ///< the step overwrites `found_inf` with 0 or 1
};

class EmaWeights;

/// Base of all fused optimizers: a torch::optim::Optimizer whose step() is one FusedStep call.
///
/// amp::GradScaler recognizes this base class and steps the optimizer without synchronizing with
/// the device. Between steps, a program may replace state tensors and edit options, because every
/// step reads both again. Replaced tensors are not kept alive.
///
/// Several threads may call step(), grad_norm() and last_step_skipped() concurrently; a lock runs
/// the calls one after another. All other calls, and edits of parameters, states and options, are
/// allowed from one thread at a time and not during a step.
class TORCHFUSE_API FusedOptimizer : public torch::optim::Optimizer {
 public:
  /// Constructs an optimizer. Groups keep their options; groups without options get `defaults`.
  FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                 std::unique_ptr<torch::optim::OptimizerOptions> defaults);
  ~FusedOptimizer() override;
  /// Movable, not copyable.
  FusedOptimizer(FusedOptimizer&&) noexcept;
  /// Movable, not copyable.
  FusedOptimizer& operator=(FusedOptimizer&&) noexcept;

  /// Adds a group. A group without options gets the defaults. Do not call add_param_group() through
  /// a reference to torch::optim::Optimizer: torch 2.15 then replaces the group's options with the
  /// defaults, because torch does not know torchfuse's option types.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  /// Updates every parameter that has a gradient.
  /// @param closure called before the update, with gradients enabled (default: none).
  /// @return the closure's value; undefined without a closure.
  /// @throws c10::Error for options out of range, for invalid tensors (naming the parameter's group
  ///   and index), for a closure while a scaler drives the step, and for a call from inside a step
  ///   of the same optimizer.
  torch::Tensor step(LossClosure closure = nullptr) final;

  /// Updates the fp32 masters of 16-bit parameters after writes that autograd does not track, such
  /// as writes through `.data()`; see torchfuse::remake_master(). After tracked writes, the next
  /// step updates the masters.
  void remake_masters();

  /// Sets process groups whose ranks step other parameters of the same model, as pipeline stages
  /// do. The gradient norm, clipping and the decision to skip a step then cover all ranks'
  /// gradients.
  ///
  /// All ranks must pass the groups in the same order and make the same step() and scaler calls,
  /// with or without gradients. A parameter on k ranks contributes k times to the norm. Norm groups
  /// are not saved.
  ///
  /// @param names names of process groups; an empty list disables norm groups.
  /// @throws c10::Error if a name is given twice, is unknown to this process, or names the group of
  ///   a ShardedOptimizer.
  void set_norm_groups(std::vector<std::string> names);

  /// Sets a threshold on the device that replaces the option skip_norm_above, such as a running
  /// statistic of norms. Every step reads the threshold's current value. The threshold is not
  /// saved.
  /// @param threshold 1-element fp32 or fp64 tensor. An undefined tensor restores the option.
  /// @throws c10::ValueError for any other tensor.
  void set_skip_norm_above(at::Tensor threshold);

  /// Exchanges the parameters and their averages in place; a second call exchanges them back. See
  /// torchfuse::swap_ema_(). EmaWeights makes both calls.
  ///
  /// Evaluate or save the model between the two calls, without changing its dtype. Until the second
  /// call, step(), remake_masters(), and saving or loading the optimizer's state throw. A parameter
  /// that was never stepped has no average and keeps its value.
  ///
  /// @throws c10::Error if ema_decay is `nullopt`, or if a parameter's dtype or sizes changed since
  ///   the first call. To recover, convert the parameter back and call swap_ema_() again.
  void swap_ema_();

  /// Returns the state in the layout that `state_dict()` has in the Python class of the same name.
  /// "state" maps a parameter's index to a dictionary of state tensors. "param_groups" is a list of
  /// option dictionaries. The tensors share memory with the optimizer.
  virtual c10::impl::GenericDict state_dict() const = 0;
  /// Checks a C++ or Python state dict. Returns a function that replaces options and states with
  /// copies of the checked values. Call the function at most once, before the next step.
  /// @throws c10::ValueError naming the group or parameter and the key; nothing is changed.
  virtual std::function<void()> prepare_state_dict(const c10::impl::GenericDict& state_dict) = 0;
  /// Loads a C++ or Python state dict. After an exception the optimizer is unchanged.
  void load_state_dict(const c10::impl::GenericDict& state_dict) {
    prepare_state_dict(state_dict)();
  }

  /// Returns the L2 norm of the last step's unscaled gradients (0-dim fp32, on the device). The
  /// norm is NaN if the step neither clipped nor checked, and otherwise 0 if there were no
  /// gradients. Undefined before the first step.
  at::Tensor grad_norm() const;
  /// Returns 1 after a skipped step, else 0 (0-dim fp32, on the device). Undefined before the first
  /// step.
  at::Tensor last_step_skipped() const;

 protected:
  friend class torchfuse::amp::GradScaler;
  friend class EmaWeights;
  friend class torchfuse::Checkpoint;
  friend class torchfuse::parallel::ShardedBase;

  /// Returns the class name, for error messages.
  virtual const char* name() const = 0;
  /// Returns the algorithm's name, for FusedStep.
  virtual const char* algorithm() const = 0;
  /// Throws if options are out of range, have another optimizer's type, or differ from the defaults
  /// in an optimizer-wide option. `group` is the group's index; `nullopt` means the defaults.
  virtual void check_options(const torch::optim::OptimizerOptions& options,
                             std::optional<std::size_t> group) const = 0;
  /// Returns one group's values, in the order of FusedStep::hyper_params().
  virtual std::vector<HyperParam> hyper_params(
      const torch::optim::OptimizerOptions& options) const = 0;
  /// Returns all options as text: "lr=0.001, betas=(0.9, 0.999), ...".
  virtual std::string describe(const torch::optim::OptimizerOptions& options) const = 0;
  /// Returns the optimizer-wide options of a step without a scaler.
  virtual FusedStepOptions step_options() const = 0;

  /// Returns a slot with the tensors of `state`; null means that there is no state yet. Creates
  /// missing tensors, except `step`, which may stay undefined.
  virtual FusedSlot make_slot(const at::Tensor& param,
                              const torch::optim::OptimizerParamState* state,
                              const torch::optim::OptimizerOptions& options) const = 0;
  /// Stores the slot's tensors in the parameter's state.
  virtual void store_slot(const FusedSlot& slot) = 0;
  /// Fills `slot` with the tensors of `state` that `options` require. Returns false if a required
  /// tensor is missing, or if there is a master that `options` do not require.
  virtual bool borrow_state(const at::Tensor& param, const torch::optim::OptimizerParamState& state,
                            const torch::optim::OptimizerOptions& options,
                            SlotTensors& slot) const = 0;
  /// Returns whether parameters with these options are rounded stochastically.
  virtual bool rounds_stochastically(const torch::optim::OptimizerOptions& options) const = 0;

  /// Calls `update`, which steps the parameters. ShardedOptimizer's override passes the gradients
  /// to the shards before the update and gathers the parameters after the update.
  virtual void around_step(const std::function<void()>& update);

  /// Throws, naming `action`, if the optimizer was moved from or the parameters contain averages.
  void check_usable(const char* action) const;
  /// Makes the next step build a new plan. Call this function after replacing all states.
  void invalidate_plan();
  /// Returns "param_groups[<group>]", or "defaults" for `nullopt`.
  static std::string options_name(std::optional<std::size_t> group);
  /// Returns `param_groups`; throws if a group holds an undefined tensor.
  static const std::vector<torch::optim::OptimizerParamGroup>& checked_groups(
      const char* name, const std::vector<torch::optim::OptimizerParamGroup>& param_groups);

  /// Request of the scaler that drives the current step; `nullopt` outside such a step.
  std::optional<ScalingRequest> scaling_;

 private:
  const torch::optim::OptimizerParamState* find_state(const at::Tensor& param) const;
  bool borrow_slots(std::vector<SlotTensors>& slots) const;
  void build_plan();
  void fused_update();
  /// Returns one line per group, and then a line for the defaults.
  std::vector<std::string> described_options() const;
  /// Returns the groups whose parameters hold the gradients: `param_groups()`, or the model's
  /// groups if the optimizer's parameters are shards.
  const std::vector<torch::optim::OptimizerParamGroup>& groups_with_gradients() const;
  /// Combines flags over the norm groups, so that an overflow on one rank skips the step on all.
  void agree_on_overflow(std::vector<at::Tensor>& flags) const;
  /// Returns the device of the first parameter with a gradient, or `nullopt`. With norm groups,
  /// returns norm_device(), because every rank takes part in the reduction, with or without
  /// gradients.
  std::optional<at::Device> device_of_grads() const;
  /// Returns the first parameter's device, or the CPU if there are no parameters.
  at::Device norm_device() const;

  struct Impl;
  std::shared_ptr<Impl> impl_;  ///< shared only with EmaWeights
};

/// Exchanges the parameters and their averages for the duration of a scope; see
/// FusedOptimizer::swap_ema_(). The optimizer may be moved or destroyed before the scope ends.
///
///     {
///       const torchfuse::optim::EmaWeights averages(optimizer);
///       validate(model);
///     }
class TORCHFUSE_API EmaWeights {
 public:
  /// @throws c10::Error if the parameters already contain their averages, or if ema_decay is
  ///   `nullopt`.
  [[nodiscard]] explicit EmaWeights(FusedOptimizer& optimizer);
  /// Restores the parameters. Warns on failure, for example if the model was converted to another
  /// dtype. After a failure, step() throws until swap_ema_() has restored the parameters.
  ~EmaWeights();
  EmaWeights(const EmaWeights&) = delete;
  EmaWeights& operator=(const EmaWeights&) = delete;
  EmaWeights(EmaWeights&&) = delete;
  EmaWeights& operator=(EmaWeights&&) = delete;

 private:
  const char* name_;  ///< name of the optimizer's class
  std::shared_ptr<FusedOptimizer::Impl> impl_;
};

/// Implementation of a fused optimizer, given its types for options and per-parameter state.
/// Instantiated for torchfuse's optimizers only.
template <class Options, class State>
class TORCHFUSE_API FusedOptimizerOf : public FusedOptimizer {
 public:
  using options_t = Options;  ///< options of the class

  /// @param param_groups parameter groups; a group without options gets `defaults`.
  /// @param defaults hyper-parameters and optimizer-wide options.
  /// @throws c10::Error for options out of range, naming the option and the group.
  explicit FusedOptimizerOf(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                            Options defaults = {});
  /// Constructs an optimizer with one parameter group.
  /// @throws c10::Error for options out of range, naming the option.
  explicit FusedOptimizerOf(std::vector<torch::Tensor> params, Options defaults = {});

  /// Writes options and states in the order of the groups' parameters.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Checks the archive, and then replaces options and states. The archive's optimizer-wide options
  /// also replace the values in the defaults.
  /// @throws c10::Error naming the missing or invalid value; the optimizer stays unchanged.
  void load(torch::serialize::InputArchive& archive) override;
  /// Returns options and states in Python's layout; see FusedOptimizer::state_dict().
  c10::impl::GenericDict state_dict() const override;
  /// Checks a state dict and returns a function that loads it; see
  /// FusedOptimizer::prepare_state_dict().
  std::function<void()> prepare_state_dict(const c10::impl::GenericDict& state_dict) override;

 private:
  template <class Archive>
  std::function<void()> prepare_load(Archive& archive);
  template <class Groups>
  void replace_state(Groups& loaded);
  const char* name() const override;
  const char* algorithm() const override;
  void check_options(const torch::optim::OptimizerOptions& options,
                     std::optional<std::size_t> group) const override;
  std::vector<HyperParam> hyper_params(
      const torch::optim::OptimizerOptions& options) const override;
  std::string describe(const torch::optim::OptimizerOptions& options) const override;
  FusedStepOptions step_options() const override;
  FusedSlot make_slot(const at::Tensor& param, const torch::optim::OptimizerParamState* state,
                      const torch::optim::OptimizerOptions& options) const override;
  void store_slot(const FusedSlot& slot) override;
  bool borrow_state(const at::Tensor& param, const torch::optim::OptimizerParamState& state,
                    const torch::optim::OptimizerOptions& options,
                    SlotTensors& slot) const override;
  bool rounds_stochastically(const torch::optim::OptimizerOptions& options) const override;
};

}  // namespace torchfuse::optim
