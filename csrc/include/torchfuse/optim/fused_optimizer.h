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

/// Scaling that one step of a fused optimizer must apply. amp::GradScaler sets it around step().
struct ScalingRequest {
  std::optional<at::Tensor> grad_scale;  ///< loss scale of the gradients
  std::optional<at::Tensor> found_inf;   ///< non-zero skips the step; set if `check` finds overflow
  bool check = false;                    ///< look for non-finite gradients inside the step
  bool found_inf_is_output = false;      ///< the next step sets it, whatever it was
};

class EmaWeights;

/// Base of all fused optimizers: a torch::optim::Optimizer whose step() is one FusedStep call.
///
/// amp::GradScaler recognizes optimizers by this base class and drives them without reading
/// anything back to the host. State tensors may be replaced and options edited between steps: every
/// step reads them again, and tensors that were replaced are not kept alive.
///
/// Several threads may call step(), grad_norm() and last_step_skipped() at the same time: each call
/// waits for the others. All other calls, and edits of parameters, states and options, are allowed
/// from one thread at a time and not during a step.
class TORCHFUSE_API FusedOptimizer : public torch::optim::Optimizer {
 public:
  /// Constructs an optimizer. Groups keep their own options; groups without any get `defaults`.
  FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                 std::unique_ptr<torch::optim::OptimizerOptions> defaults);
  ~FusedOptimizer() override;
  /// Movable, not copyable.
  FusedOptimizer(FusedOptimizer&&) noexcept;
  /// Movable, not copyable.
  FusedOptimizer& operator=(FusedOptimizer&&) noexcept;

  /// Adds a group with its own options, or with the defaults if it has none. Call it on the fused
  /// optimizer: through a reference to the base class, torch 2.15 gives the group the defaults,
  /// because it does not know the options of torchfuse.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  /// Updates every parameter that has a gradient. Calls `closure` first, with gradients enabled,
  /// and returns its value; throws for a closure while a scaler drives the step.
  /// @throws c10::Error for options out of range, for invalid tensors, naming the parameter's group
  ///   and index, and for a step within a step of the same optimizer.
  torch::Tensor step(LossClosure closure = nullptr) final;

  /// Updates the fp32 masters of 16-bit parameters after writes that autograd does not track, such
  /// as writes through `.data()`: see torchfuse::remake_master(). Other writes need no call.
  void remake_masters();

  /// Sets the names of process groups whose processes step other parameters of one model, as the
  /// stages of a pipeline do: norm, clipping and the decision to skip a step become those of all
  /// gradients. All processes give groups in the same order, and make the same steps and calls of a
  /// scaler, with gradients or without. A parameter that several of them have counts as often. Not
  /// part of what is saved. An empty list ends it.
  /// @throws c10::Error if a name is given twice, names no group of this process, or the
  ///   group of a ShardedOptimizer.
  void set_norm_groups(std::vector<std::string> names);

  /// Sets a threshold that the device reads in every step, such as a running statistic of norms, in
  /// the place of the option skip_norm_above. Not part of what is saved.
  /// @param threshold one element of fp32 or fp64, which may be written between steps. Undefined:
  ///   the option holds again.
  /// @throws c10::ValueError for another tensor.
  void set_skip_norm_above(at::Tensor threshold);

  /// Exchanges the parameters and their averages in place, or exchanges them back: see
  /// torchfuse::swap_ema_(). Evaluate or save the model in between, in its dtype; until the second
  /// call the optimizer takes no step, makes no masters, and saves and loads no state. Parameters
  /// that have not been stepped have no average and keep their values. EmaWeights makes both calls.
  /// @throws c10::Error if ema_decay is none; and if a parameter's dtype or sizes have changed
  ///   since the first call: convert it back and call again.
  void swap_ema_();

  /// Returns the state in the layout of `state_dict()` of Python's class of the same name: "state",
  /// a dictionary from a parameter's index to the names and tensors of its state, and
  /// "param_groups", a list of dictionaries of options. Tensors share memory with the optimizer.
  virtual c10::impl::GenericDict state_dict() const = 0;
  /// Checks a state_dict() of C++ or Python, and returns the function that replaces options and
  /// states by copies of what it holds. Call that function at most once, before the next step.
  /// @throws c10::ValueError naming the group or parameter and the key; nothing is changed.
  virtual std::function<void()> prepare_state_dict(const c10::impl::GenericDict& state_dict) = 0;
  /// Loads a state_dict() of C++ or Python: all of it or, after an exception, nothing.
  void load_state_dict(const c10::impl::GenericDict& state_dict) {
    prepare_state_dict(state_dict)();
  }

  /// Returns the L2 norm of the last step's unscaled gradients (0-dim fp32, on the device): NaN if
  /// the step neither clipped nor checked, else 0 without gradients. Undefined before a step.
  at::Tensor grad_norm() const;
  /// Returns 1 after a skipped step, else 0 (0-dim fp32, on the device). Undefined before a step.
  at::Tensor last_step_skipped() const;

 protected:
  friend class torchfuse::amp::GradScaler;
  friend class EmaWeights;
  friend class torchfuse::Checkpoint;
  friend class torchfuse::parallel::ShardedBase;

  /// Returns the name of the class, for error messages.
  virtual const char* name() const = 0;
  /// Returns the name of the algorithm, for FusedStep.
  virtual const char* algorithm() const = 0;
  /// Throws if options are out of range, of another optimizer's type, or differ from the defaults
  /// where the option is optimizer-wide. `group` is the group's index, none for the defaults.
  virtual void check_options(const torch::optim::OptimizerOptions& options,
                             std::optional<std::size_t> group) const = 0;
  /// Returns the values for one parameter group, in the order of FusedStep::hyper_params().
  virtual std::vector<HyperParam> hyper_params(
      const torch::optim::OptimizerOptions& options) const = 0;
  /// Returns all options as text: "lr=0.001, betas=(0.9, 0.999), ...".
  virtual std::string describe(const torch::optim::OptimizerOptions& options) const = 0;
  /// Returns the optimizer-wide options of a step without a scaler.
  virtual FusedStepOptions step_options() const = 0;

  /// Returns a slot with the tensors of `state` (null: no state yet). Creates missing tensors, but
  /// `step` may stay undefined.
  virtual FusedSlot make_slot(const at::Tensor& param,
                              const torch::optim::OptimizerParamState* state,
                              const torch::optim::OptimizerOptions& options) const = 0;
  /// Stores the slot's tensors in the parameter's state.
  virtual void store_slot(const FusedSlot& slot) = 0;
  /// Fills `slot` with the tensors of `state` that `options` require. Returns false if one is
  /// missing, or if there is a master that `options` do not require.
  virtual bool borrow_state(const at::Tensor& param, const torch::optim::OptimizerParamState& state,
                            const torch::optim::OptimizerOptions& options,
                            SlotTensors& slot) const = 0;
  /// Returns whether parameters with these options are rounded stochastically.
  virtual bool rounds_stochastically(const torch::optim::OptimizerOptions& options) const = 0;

  /// Calls `update`, which steps the parameters. A class whose parameters are shards of a model's
  /// does before and after it what makes them parts of one step.
  virtual void around_step(const std::function<void()>& update);

  /// Throws, naming `action`, while the averages are in the parameters' place.
  void refuse_swapped(const char* action) const;
  /// Makes the next step build a new plan; call it after replacing the whole state.
  void invalidate_plan();
  /// Returns "param_groups[<group>]", or "defaults" for none.
  static std::string options_name(std::optional<std::size_t> group);
  /// Returns `param_groups`; throws if a group holds an undefined tensor.
  static const std::vector<torch::optim::OptimizerParamGroup>& checked_groups(
      const char* name, const std::vector<torch::optim::OptimizerParamGroup>& param_groups);

  /// Request of the scaler that drives the current step; none outside such a step.
  std::optional<ScalingRequest> scaling_;

 private:
  const torch::optim::OptimizerParamState* find_state(const at::Tensor& param) const;
  bool borrow_slots(std::vector<SlotTensors>& slots) const;
  void build_plan();
  void fused_update();
  /// One line for each group and one for the defaults.
  std::vector<std::string> described_options() const;
  /// The groups whose parameters hold the gradients: `param_groups()`, or the model's groups if
  /// these parameters are parts of the model's.
  const std::vector<torch::optim::OptimizerParamGroup>& groups_with_gradients() const;
  /// Combines flags over the norm groups, so that an overflow in one process counts in all.
  void agree_on_overflow(std::vector<at::Tensor>& flags) const;
  /// Device of the first of them that has a gradient; none if none has one. A process that shares
  /// its norm with others takes part without a gradient too.
  std::optional<at::Device> device_of_grads() const;
  /// Device of the first parameter.
  at::Device norm_device() const;

  struct Impl;
  std::shared_ptr<Impl> impl_;  ///< shared with EmaWeights alone
};

/// Puts the averages in the parameters' place for as long as it lives, as swap_ema_() does. The
/// optimizer may be moved or end before it.
class TORCHFUSE_API EmaWeights {
 public:
  /// @throws c10::Error if the averages are in the parameters' place already, or ema_decay is none.
  [[nodiscard]] explicit EmaWeights(FusedOptimizer& optimizer);
  /// Restores the parameters. Warns if that fails, as after the model was converted to another
  /// dtype; then the optimizer refuses steps until swap_ema_() restores them.
  ~EmaWeights();
  EmaWeights(const EmaWeights&) = delete;
  EmaWeights& operator=(const EmaWeights&) = delete;
  EmaWeights(EmaWeights&&) = delete;
  EmaWeights& operator=(EmaWeights&&) = delete;

 private:
  const char* name_;  ///< of the optimizer's class
  std::shared_ptr<FusedOptimizer::Impl> impl_;
};

/// Implementation of a fused optimizer with given types of options and per-parameter states.
/// Defined for the optimizers of torchfuse only.
template <class Options, class State>
class TORCHFUSE_API FusedOptimizerOf : public FusedOptimizer {
 public:
  using options_t = Options;  ///< the options of the class

  /// @param param_groups groups without options of their own get `defaults`.
  /// @param defaults hyper-parameters, and the optimizer-wide options.
  /// @throws c10::Error for options out of range, naming the option and the group.
  explicit FusedOptimizerOf(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                            Options defaults = {});
  /// Constructs an optimizer of one group of parameters. Throws for options out of range.
  explicit FusedOptimizerOf(std::vector<torch::Tensor> params, Options defaults = {});

  /// Writes options and states, in the order of the groups' parameters.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Checks everything in the archive before any of it replaces the optimizer's own. The archive's
  /// optimizer-wide options also replace those of the defaults.
  void load(torch::serialize::InputArchive& archive) override;
  /// Returns options and states in Python's layout; see FusedOptimizer.
  c10::impl::GenericDict state_dict() const override;
  /// Checks a state dict and returns what loads it; see FusedOptimizer.
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
