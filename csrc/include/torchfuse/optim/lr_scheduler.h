// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <torchfuse/export.h>
#include <torchfuse/optim/lr_scheduler/state.h>

namespace torchfuse::optim {

/// One number for all parameter groups, or a vector with one number per group.
using PerGroup = std::variant<double, std::vector<double>>;

/// Base of all learning-rate schedulers, with the rules of torch.optim.lr_scheduler.LRScheduler.
/// Schedulers support every torch::optim::Optimizer.
///
///     torchfuse::optim::StepLR scheduler(optimizer, 30, 0.1);
///     for (int epoch = 0; epoch < 100; ++epoch) {
///       train(model, optimizer);
///       scheduler.step();
///     }
///
/// As in Python, the constructor sets the learning rates of epoch 0. Most formulas are recursive:
/// the next rate is computed from the current rate, so edits of a group's rate between steps carry
/// over. Unlike Python, a scheduler does not warn if step() precedes the optimizer's first step.
///
/// Base rates are the groups' rates before any scheduler changed them. All live schedulers of one
/// optimizer share the base rates, as Python's schedulers share `initial_lr`. C++ options cannot
/// store `initial_lr`, so the base rates are lost with the optimizer's last scheduler.
///
/// A scheduler keeps a reference to its optimizer. The optimizer must not be moved or destroyed
/// before the scheduler. Schedulers are neither copyable nor movable. Call a scheduler from one
/// thread at a time, and not during an optimizer step. Only step_if_applied() synchronizes with a
/// device.
///
/// To write a scheduler, override get_lr(). If there is a closed form, override closed_form_lr();
/// if there is state, override visit_state(). Call initial_step() last in the constructor.
class TORCHFUSE_API LRScheduler {
 public:
  LRScheduler(const LRScheduler&) = delete;
  LRScheduler& operator=(const LRScheduler&) = delete;
  virtual ~LRScheduler();

  /// Returns the class name, which errors and archives contain.
  const char* name() const { return name_; }
  /// Sets the rates of the next epoch. On an error, nothing has changed.
  /// @throws c10::Error if groups were added or removed since construction, or if a new rate is
  ///   infinite, NaN or invalid for the optimizer.
  virtual void step();
  /// Calls step() unless the optimizer's last step was skipped. Synchronizes with the optimizer's
  /// device to read one flag.
  /// @return whether step() was called; false before the optimizer's first step.
  /// @throws c10::Error unless the optimizer is a FusedOptimizer, because other optimizers do not
  ///   record skipped steps.
  bool step_if_applied();
  /// Calls step() if `scaler` applied the optimizer's last step. Supports all optimizers. If
  /// several optimizers share the scaler, only the scheduler's optimizer matters. Synchronizes with
  /// the device only for a FusedOptimizer.
  /// @tparam Scaler torchfuse::amp::GradScaler.
  /// @param scaler scaler that steps the optimizer.
  /// @return whether step() was called.
  template <class Scaler>
  bool step_if_applied(const Scaler& scaler) {
    const bool applied = scaler.last_step_applied(optimizer_);
    if (applied) step();
    return applied;
  }

  /// Returns the rates that the last step set, one per group.
  const std::vector<double>& get_last_lr() const { return last_lr_; }
  /// Returns the index of the last epoch; a new scheduler is at epoch 0.
  virtual std::int64_t last_epoch() const { return last_epoch_; }
  /// Returns the base rates, one per group.
  const std::vector<double>& base_lrs() const { return base_lrs_; }
  /// Returns the optimizer.
  torch::optim::Optimizer& optimizer() const { return optimizer_; }

  /// Returns the state, with the entries of Python's `state_dict()`. Functions are not included.
  LRSchedulerState state_dict() const;
  /// Checks the entire state, and then replaces the scheduler's state, including the constructor's
  /// arguments. Does not change the groups' rates, which belong to the optimizer's checkpoint.
  /// @throws c10::Error for a missing key, or for a value with the wrong type, length or range.
  void load_state_dict(const LRSchedulerState& state);
  /// Writes the state and the class names of the scheduler and all inner schedulers.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Reads an archive that save() wrote. On an error, nothing has changed.
  /// @throws c10::Error for another class's archive, and as load_state_dict().
  void load(torch::serialize::InputArchive& archive);

 protected:
  /// @param name class name with static storage duration.
  /// @param optimizer optimizer whose rates the scheduler sets.
  /// @param last_epoch -1 (default), or the epoch after which to resume. The base rates come from
  ///   the optimizer's other schedulers, or else from the groups. Loading a saved state does not
  ///   need `last_epoch`.
  /// @throws c10::Error for a last_epoch below -1 and for a rate that is negative, infinite or NaN.
  LRScheduler(const char* name, torch::optim::Optimizer& optimizer, std::int64_t last_epoch = -1);

  /// Takes the first step. Constructors of derived classes call initial_step() last.
  void initial_step();
  /// Computes the rates of `epoch`, one per group, from the previous epoch's rates.
  virtual std::vector<double> get_lr(std::int64_t epoch) const;
  /// Computes the rates of `epoch` from the base rates alone, or returns `nullopt` (default).
  virtual std::optional<std::vector<double>> closed_form_lr(std::int64_t epoch) const;
  /// Computes the momentum of `epoch`, one per group. An empty vector leaves the momentum
  /// unchanged.
  virtual std::vector<double> get_momentum(std::int64_t epoch) const;
  /// Visits the state's entries. The base class visits `base_lrs`, `last_epoch`, `_step_count` and
  /// `_last_lr`.
  virtual void visit_state(LRSchedulerFields& fields);
  /// Returns the inner schedulers.
  virtual std::vector<std::shared_ptr<LRScheduler>> schedulers() const { return {}; }

  /// Sets the rates of `epoch`. Uses the closed form if there is one and `closed` is true.
  void update_lr(std::int64_t epoch, bool closed);
  /// Returns the groups' current rates.
  std::vector<double> current_lrs() const;
  /// Sets the groups' rates and last_lr_. On an error, nothing has changed.
  void set_lrs(const std::vector<double>& rates);
  /// Sets the groups' rates. Makes `rates` the shared base rates if the optimizer has no other
  /// scheduler.
  void start_from(const std::vector<double>& rates);
  /// Calls `change`. If `change` throws, restores the groups' rates and momenta, the shared base
  /// rates and the inner schedulers.
  void all_or_nothing(const std::function<void()>& change);
  /// Throws if the number of groups has changed since construction.
  void check_groups() const;
  /// Returns whether initial_step() is running.
  bool is_initial() const { return is_initial_; }
  /// Returns the base rates that all of the optimizer's schedulers share.
  std::vector<double>& initial_lrs() const;
  /// Returns one number per group. Throws, naming `option`, for a wrong count or if `valid` returns
  /// false for a number; `range` says in words which numbers are valid.
  std::vector<double> per_group(const char* option, const PerGroup& values, const char* range,
                                bool (*valid)(double)) const;

  std::vector<double> base_lrs_;  ///< base rates, one per group
  std::vector<double> last_lr_;   ///< result of get_last_lr()
  std::int64_t last_epoch_;       ///< result of last_epoch()

 private:
  friend class ChainedScheduler;
  friend class LRSchedulerFields;
  friend class SequentialLR;
  struct InitialRates;

  std::string signature() const;
  void undo_first_step();
  void read_state(const LRSchedulerState& state, const std::string& owner, bool assign);

  const char* name_;
  torch::optim::Optimizer& optimizer_;
  std::shared_ptr<InitialRates> initial_;
  std::int64_t step_count_ = 0;
  bool is_initial_ = false;
};

/// Writes a scheduler to an archive, for torch::save(scheduler, ...).
inline torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                                   const LRScheduler& scheduler) {
  scheduler.save(archive);
  return archive;
}

/// Reads a scheduler from an archive, for torch::load(scheduler, ...).
inline torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                                  LRScheduler& scheduler) {
  scheduler.load(archive);
  return archive;
}

}  // namespace torchfuse::optim
