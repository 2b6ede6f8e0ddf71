// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchfuse/export.h>
#include <torchfuse/fused_step.h>

namespace torchfuse::amp {
class GradScaler;
}

namespace torchfuse::optim {

/// What a scaler asks of the next step of a fused optimizer. Set by amp::GradScaler around step().
struct ScalingRequest {
  std::optional<at::Tensor> grad_scale;  ///< loss scale still on the gradients
  std::optional<at::Tensor> found_inf;   ///< flag to obey, and to set where `check` finds overflow
  bool check = false;                    ///< look for non-finite gradients inside the step
};

/// Base of all fused optimizers: a torch::optim::Optimizer whose step() is one FusedStep call.
///
/// amp::GradScaler recognizes optimizers by this base class and drives them without reading
/// anything back to the host. State tensors may be replaced and options edited between steps: both
/// are looked at again in every step, and nothing that was replaced is kept alive.
///
/// Threads may call step(), grad_norm() and last_step_skipped() at the same time: one waits for the
/// other. Everything else, and edits of parameters, states and options, is for one thread at a
/// time and not during a step.
class TORCHFUSE_API FusedOptimizer : public torch::optim::Optimizer {
 public:
  /// Groups keep the options that they come with; those without any get `defaults`.
  FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                 std::unique_ptr<torch::optim::OptimizerOptions> defaults);
  ~FusedOptimizer() override;
  /// Movable, not copyable.
  FusedOptimizer(FusedOptimizer&&) noexcept;
  /// Movable, not copyable.
  FusedOptimizer& operator=(FusedOptimizer&&) noexcept;

  /// Adds a group with the options that it comes with, or with the defaults. Call it on the fused
  /// optimizer: through a reference to the base class torch 2.15 gives the group the
  /// defaults, because it does not know our options.
  void add_param_group(const torch::optim::OptimizerParamGroup& param_group);

  /// One update of every parameter that has a gradient. `closure` is called first, with gradients
  /// enabled; its value is returned. Refused while a scaler drives the step.
  /// @throws c10::Error for options out of range, for tensors that no step can be taken with,
  /// naming
  ///   the parameter's group and place, and for a step within a step of the same optimizer.
  torch::Tensor step(LossClosure closure = nullptr) final;

  /// Brings the fp32 masters to 16-bit parameters that were written to in a way that autograd does
  /// not see, as through `.data()`: see torchfuse::remake_master(). Other writes need no call.
  void remake_masters();

  /// True norm of the last step's unscaled gradients (0-dim fp32, on the device): NaN if the step
  /// neither clipped nor checked, 0 if there were no gradients. Undefined before the first step.
  at::Tensor grad_norm() const;
  /// 1 if the last step was skipped, else 0 (0-dim fp32, on the device). Undefined before a step.
  at::Tensor last_step_skipped() const;

 protected:
  friend class torchfuse::amp::GradScaler;

  /// Name of the class, for error messages.
  virtual const char* name() const = 0;
  /// Algorithm name for FusedStep.
  virtual const char* algorithm() const = 0;
  /// Throws if options are out of range, of another optimizer's type, or differ from the defaults
  /// where the option is optimizer-wide. `group` is the group's index, none for the defaults.
  virtual void check_options(const torch::optim::OptimizerOptions& options,
                             std::optional<std::size_t> group) const = 0;
  /// Values in FusedStep::hyper_params() order for one parameter group.
  virtual std::vector<HyperParam> hyper_params(
      const torch::optim::OptimizerOptions& options) const = 0;
  /// Optimizer-wide options of a step without a scaler.
  virtual FusedStepOptions step_options() const = 0;

  /// A slot with the tensors of `state` (null: none yet); tensors that it lacks are created, `step`
  /// may stay undefined.
  virtual FusedSlot make_slot(const at::Tensor& param,
                              const torch::optim::OptimizerParamState* state,
                              const torch::optim::OptimizerOptions& options) const = 0;
  /// Puts the slot's tensors into the parameter's state.
  virtual void store_slot(const FusedSlot& slot) = 0;
  /// The tensors of `state` that `options` ask for. False if one is missing, or if there is a
  /// master that they do not ask for.
  virtual bool borrow_state(const at::Tensor& param, const torch::optim::OptimizerParamState& state,
                            const torch::optim::OptimizerOptions& options,
                            SlotTensors& slot) const = 0;
  /// Whether parameters with these options are rounded at random.
  virtual bool rounds_stochastically(const torch::optim::OptimizerOptions& options) const = 0;

  /// For those who replace the whole state: the next step plans afresh.
  void invalidate_plan();
  /// "param_groups[<group>]", or "defaults".
  static std::string options_name(std::optional<std::size_t> group);
  /// Returns its argument; throws if a group holds an undefined tensor.
  static const std::vector<torch::optim::OptimizerParamGroup>& checked_groups(
      const char* name, const std::vector<torch::optim::OptimizerParamGroup>& param_groups);

  /// Set by the scaler that drives the current step, and removed afterwards.
  std::optional<ScalingRequest> scaling_;

 private:
  const torch::optim::OptimizerParamState* find_state(const at::Tensor& param) const;
  bool borrow_slots(std::vector<SlotTensors>& slots) const;
  void build_plan();
  void fused_update();

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A fused optimizer with options and per-parameter states of these types: all that its class needs
/// but these two. Defined for the optimizers of torchfuse.
template <class Options, class State>
class TORCHFUSE_API FusedOptimizerOf : public FusedOptimizer {
 public:
  /// @param param_groups groups without options of their own get `defaults`.
  /// @param defaults hyper-parameters, and the optimizer-wide options.
  /// @throws c10::Error for options out of range, naming the option and the group.
  explicit FusedOptimizerOf(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                            Options defaults = {});
  /// The same for one group.
  explicit FusedOptimizerOf(std::vector<torch::Tensor> params, Options defaults = {});

  /// Options and states in the order of the groups' parameters.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Checks everything the archive holds before any of it replaces the optimizer's own. The
  /// optimizer-wide options of the archive become the defaults' too.
  void load(torch::serialize::InputArchive& archive) override;

 private:
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
  bool borrow_state(const at::Tensor& param, const torch::optim::OptimizerParamState& state,
                    const torch::optim::OptimizerOptions& options,
                    SlotTensors& slot) const override;
  bool rounds_stochastically(const torch::optim::OptimizerOptions& options) const override;

  /// Makes the class one of optimizer_classes() when the library is loaded.
  static const bool listed_;
};

}  // namespace torchfuse::optim
