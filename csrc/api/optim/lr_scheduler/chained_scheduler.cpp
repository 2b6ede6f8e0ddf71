// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/optim/lr_scheduler/chained_scheduler.h>

#include <utility>

#include "api/optim/lr_scheduler/inner_schedulers.h"

namespace torchfuse::optim {

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

}  // namespace torchfuse::optim
