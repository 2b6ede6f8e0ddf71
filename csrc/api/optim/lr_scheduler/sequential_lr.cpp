// SPDX-License-Identifier: BSD-3-Clause
// Schedulers that contain schedulers.
#include <torchfuse/optim/lr_scheduler/sequential_lr.h>

#include <c10/util/Exception.h>
#include <torchfuse/optim/lr_scheduler/chained_scheduler.h>
#include <torchfuse/optim/lr_scheduler/reduce_lr_on_plateau.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "api/optim/lr_scheduler/state_values.h"

namespace torchfuse::optim {

namespace {

/// Checks inner schedulers and returns their optimizer. Throws, naming `owner` and the index, for
/// an empty list, a null pointer, a ReduceLROnPlateau, or a scheduler of another optimizer. A null
/// `optimizer` means the first scheduler's optimizer.
torch::optim::Optimizer& check_inner(const char* owner,
                                     const std::vector<std::shared_ptr<LRScheduler>>& schedulers,
                                     torch::optim::Optimizer* optimizer = nullptr) {
  TORCH_CHECK_VALUE(!schedulers.empty(), owner, ": expected at least one scheduler, got none.");
  for (std::size_t i = 0; i < schedulers.size(); ++i) {
    const LRScheduler* scheduler = schedulers[i].get();
    TORCH_CHECK_VALUE(scheduler != nullptr, owner, ": expected schedulers[", i,
                      "] to be a scheduler, got a null pointer.");
    TORCH_CHECK_VALUE(dynamic_cast<const ReduceLROnPlateau*>(scheduler) == nullptr, owner,
                      ": expected schedulers[", i,
                      "] to step without a metric, got a ReduceLROnPlateau. Step the "
                      "ReduceLROnPlateau separately.");
    if (optimizer == nullptr) optimizer = &scheduler->optimizer();
    TORCH_CHECK_VALUE(&scheduler->optimizer() == optimizer, owner, ": expected schedulers[", i,
                      "] to belong to the same optimizer, got a ", scheduler->name(),
                      " of another optimizer.");
  }
  return *optimizer;
}

}  // namespace

// --- ChainedScheduler ----------------------------------------------------------------------------

ChainedScheduler::ChainedScheduler(std::vector<std::shared_ptr<LRScheduler>> schedulers)
    : LRScheduler("ChainedScheduler", check_inner("ChainedScheduler", schedulers)),
      schedulers_(std::move(schedulers)) {}

void ChainedScheduler::step() {
  check_groups();
  all_or_nothing([&] {
    for (const auto& scheduler : schedulers_) scheduler->step();
  });
  last_lr_ = current_lrs();
}

void ChainedScheduler::visit_state(LRSchedulerFields& fields) {
  fields.numbers("_last_lr", last_lr_);
  fields.schedulers("_schedulers", schedulers_);
}

// --- SequentialLR --------------------------------------------------------------------------------

SequentialLR::SequentialLR(torch::optim::Optimizer& optimizer,
                           std::vector<std::shared_ptr<LRScheduler>> schedulers,
                           std::vector<std::int64_t> milestones, std::int64_t last_epoch)
    : LRScheduler("SequentialLR", optimizer, last_epoch),
      schedulers_(std::move(schedulers)),
      milestones_(std::move(milestones)) {
  check();
  last_epoch_ = last_epoch + 1;
  all_or_nothing([&] {
    set_lrs(initial_lrs());
    for (const auto& scheduler : schedulers_) scheduler->undo_first_step();
    schedulers_[0]->initial_step();
  });
  last_lr_ = schedulers_[0]->get_last_lr();
}

void SequentialLR::check() const {
  check_inner(name(), schedulers_, &optimizer());
  check_groups();
  for (std::size_t i = 0; i < schedulers_.size(); ++i) {
    schedulers_[i]->check_groups();
    TORCH_CHECK_VALUE(i == 0 || schedulers_[i]->schedulers().empty(), name(),
                      ": expected schedulers[", i, "] to contain no schedulers, got a ",
                      schedulers_[i]->name(), ". Only schedulers[0] may contain schedulers.");
  }
  TORCH_CHECK_VALUE(milestones_.size() == schedulers_.size() - 1, name(), ": expected ",
                    schedulers_.size() - 1, " milestones, one fewer than schedulers, got ",
                    milestones_.size(), ".");
  std::int64_t least = 1;
  for (std::size_t i = 0; i < milestones_.size(); ++i) {
    TORCH_CHECK_VALUE(milestones_[i] >= least, name(), ": expected milestones[", i,
                      "] to be at least ", least, ", got ", milestones_[i],
                      ". Milestones must increase.");
    least = milestones_[i] + 1;
  }
}

void SequentialLR::step() {
  const std::int64_t epoch = last_epoch_ + 1;
  const auto past = std::upper_bound(milestones_.begin(), milestones_.end(), epoch);
  const auto turn = static_cast<std::size_t>(past - milestones_.begin());
  LRScheduler& scheduler = *schedulers_[turn];
  if (turn > 0 && milestones_[turn - 1] == epoch) {
    scheduler.update_lr(0, /*closed=*/true);
  } else {
    scheduler.step();
  }
  last_epoch_ = epoch;
  last_lr_ = scheduler.get_last_lr();
}

void SequentialLR::visit_state(LRSchedulerFields& fields) {
  const auto read = [&](const c10::IValue& saved, const std::string& expected, bool assign) {
    const auto elements = to_elements(saved);
    TORCH_CHECK_VALUE(elements && elements->size() == milestones_.size(), expected, " to be ",
                      milestones_.size(), " epochs, got ", shown(saved), ".");
    std::vector<std::int64_t> milestones;
    for (const c10::IValue& element : *elements) {
      const std::int64_t least = milestones.empty() ? 1 : milestones.back() + 1;
      TORCH_CHECK_VALUE(element.isInt() && element.toInt() >= least, expected,
                        " to be at least 1 and increasing, got ", shown(saved), ".");
      milestones.push_back(element.toInt());
    }
    if (assign) milestones_ = std::move(milestones);
  };
  fields.entry("_milestones", milestones_, read);
  fields.integer("last_epoch", last_epoch_, -1);
  fields.numbers("_last_lr", last_lr_);
  fields.schedulers("_schedulers", schedulers_);
}

}  // namespace torchfuse::optim
