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

/// One number for all parameter groups, or one for each.
using PerGroup = std::variant<double, std::vector<double>>;

/// Base of all learning-rate schedulers, with the rules of torch.optim.lr_scheduler.LRScheduler. It
/// works with every torch::optim::Optimizer.
///
///     torchfuse::optim::StepLR scheduler(optimizer, 30, 0.1);
///     for (int epoch = 0; epoch < 100; ++epoch) {
///       train(model, optimizer);
///       scheduler.step();
///     }
///
/// The constructor makes the first step, as in Python: it sets the rates of epoch 0. Most formulas
/// are recursive, so that edits of a group's rate between steps carry over. Python's warning for a
/// scheduler's step before the first of the optimizer is left out.
///
/// Base rates are those of the groups before any scheduler touched them. All schedulers of one
/// optimizer that live at the same time share them, as Python shares `initial_lr` in the groups.
/// Afterwards they are forgotten, because C++ options have no such entry.
///
/// A scheduler keeps a reference to its optimizer, which must neither move nor end before it.
/// Neither copyable nor movable. All calls come from one thread at a time, not during a step of the
/// optimizer. Only step_if_applied() waits for a device.
///
/// A class of your own overrides get_lr(), and closed_form_lr() and visit_state() where it has a
/// closed form or a state; its constructor calls initial_step() at the end.
class TORCHFUSE_API LRScheduler {
 public:
  LRScheduler(const LRScheduler&) = delete;
  LRScheduler& operator=(const LRScheduler&) = delete;
  virtual ~LRScheduler();

  /// Returns the name of the class, which errors and archives hold.
  const char* name() const { return name_; }
  /// Sets the rates of the next epoch. On an error, nothing has changed.
  /// @throws c10::Error if groups were added or removed since the constructor, or if a rate would
  ///   be infinite or NaN, or one that the optimizer refuses.
  virtual void step();
  /// Calls step() unless the last step of the optimizer was skipped. Returns whether it did; false
  /// before the first step. Reads one flag of the optimizer and waits for its device.
  /// @throws c10::Error unless the optimizer is a FusedOptimizer: others do not know.
  bool step_if_applied();
  /// The same for every optimizer that `scaler` steps. Several may share the scaler: what counts is
  /// the last step of this one. Waits for a device only if the optimizer is a FusedOptimizer.
  /// @tparam Scaler torchfuse::amp::GradScaler.
  template <class Scaler>
  bool step_if_applied(const Scaler& scaler) {
    const bool applied = scaler.last_step_applied(optimizer_);
    if (applied) step();
    return applied;
  }

  /// Returns the rates that the last step set, one for each group.
  const std::vector<double>& get_last_lr() const { return last_lr_; }
  /// Returns the number of steps since the constructor's, which is epoch 0.
  virtual std::int64_t last_epoch() const { return last_epoch_; }
  /// Returns the base rates, one for each group.
  const std::vector<double>& base_lrs() const { return base_lrs_; }
  /// Returns the optimizer.
  torch::optim::Optimizer& optimizer() const { return optimizer_; }

  /// Returns the state, with the entries of Python's `state_dict()`. Functions are not part of it.
  LRSchedulerState state_dict() const;
  /// Checks the whole state before it replaces the scheduler's own, its arguments included. The
  /// rates of the groups stay: they belong to the optimizer's checkpoint.
  /// @throws c10::Error for a missing key, and for a value of another type, length or range.
  void load_state_dict(const LRSchedulerState& state);
  /// Writes the state, and the names of the class and of all schedulers within.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Reads what save() wrote. On an error, nothing has changed.
  void load(torch::serialize::InputArchive& archive);

 protected:
  /// @param name name of the class, of static storage duration.
  /// @param optimizer steps with the rates that the scheduler sets.
  /// @param last_epoch -1, or the epoch after which to go on. Then the base rates are those that
  ///   other schedulers of the optimizer have, else the groups' rates. Loading a saved state does
  ///   not need it.
  /// @throws c10::Error for a last_epoch below -1 and for a rate that is negative, infinite or NaN.
  LRScheduler(const char* name, torch::optim::Optimizer& optimizer, std::int64_t last_epoch = -1);

  /// Makes the first step; the last call in a constructor.
  void initial_step();
  /// Returns the rates of `epoch`, one for each group, from those of the epoch before.
  virtual std::vector<double> get_lr(std::int64_t epoch) const;
  /// Returns the rates of `epoch` from the base rates alone; none: there is no such formula.
  virtual std::optional<std::vector<double>> closed_form_lr(std::int64_t epoch) const;
  /// Returns the momentum of `epoch`, one for each group; empty: it stays as it is.
  virtual std::vector<double> get_momentum(std::int64_t epoch) const;
  /// Names the entries of the state. Those of this class are `base_lrs`, `last_epoch`,
  /// `_step_count` and `_last_lr`.
  virtual void visit_state(LRSchedulerFields& fields);
  /// Returns the schedulers within.
  virtual std::vector<std::shared_ptr<LRScheduler>> schedulers() const { return {}; }

  /// Sets the rates of `epoch`, by the closed form if there is one and `closed` is true.
  void update_lr(std::int64_t epoch, bool closed);
  /// Returns the rates that the groups have now.
  std::vector<double> current_lrs() const;
  /// Sets the groups' rates and remembers them. On an error, nothing has changed.
  void set_lrs(const std::vector<double>& rates);
  /// Sets the groups' rates as base rates, unless another scheduler has set those of the optimizer.
  void start_from(const std::vector<double>& rates);
  /// Calls `change`. After an error in it, the rates and momenta of the groups, the shared base
  /// rates and the schedulers within are as before.
  void all_or_nothing(const std::function<void()>& change);
  /// Throws if the number of groups is another than at construction.
  void check_groups() const;
  /// Returns whether initial_step() is running.
  bool is_initial() const { return is_initial_; }
  /// Returns the base rates that all schedulers of the optimizer share.
  std::vector<double>& initial_lrs() const;
  /// Returns one number for each group. Throws, naming `option`, for another count or a number for
  /// which `valid` does not hold.
  std::vector<double> per_group(const char* option, const PerGroup& values, const char* range,
                                bool (*valid)(double)) const;

  std::vector<double> base_lrs_;  ///< base rates of this scheduler
  std::vector<double> last_lr_;   ///< what get_last_lr() returns
  std::int64_t last_epoch_;       ///< what last_epoch() returns

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
