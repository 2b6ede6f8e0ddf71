// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <torchfuse/export.h>
#include <torchfuse/optim/lr_scheduler.h>

namespace torchfuse::optim {

/// Runs schedulers one after another, like torch.optim.lr_scheduler.SequentialLR. At each milestone
/// the next scheduler starts at epoch 0. A scheduler with a closed form then starts from the base
/// rates, any other scheduler from the current rates.
///
///     SequentialLR scheduler(optimizer,
///                            {std::make_shared<LinearLR>(optimizer, 0.1, 1.0, 5),
///                             std::make_shared<CosineAnnealingLR>(optimizer, 95)},
///                            {5});
///
/// The constructor undoes the inner schedulers' first steps, restores the base rates, and repeats
/// the first scheduler's first step.
class TORCHFUSE_API SequentialLR : public LRScheduler {
 public:
  /// @param optimizer see LRScheduler.
  /// @param schedulers at least one scheduler, all for `optimizer`, without ReduceLROnPlateau. Only
  ///   the first may be a ChainedScheduler or SequentialLR.
  /// @param milestones epochs at which the next scheduler starts, at least 1 and increasing.
  /// @param last_epoch see LRScheduler.
  /// @throws c10::Error for an invalid argument.
  SequentialLR(torch::optim::Optimizer& optimizer,
               std::vector<std::shared_ptr<LRScheduler>> schedulers,
               std::vector<std::int64_t> milestones, std::int64_t last_epoch = -1);

  /// Steps the active scheduler.
  void step() override;

 protected:
  /// Visits `_milestones`, `last_epoch`, `_last_lr` and `_schedulers`.
  void visit_state(LRSchedulerFields& fields) override;
  /// Returns the inner schedulers.
  std::vector<std::shared_ptr<LRScheduler>> schedulers() const override { return schedulers_; }

 private:
  void check() const;

  std::vector<std::shared_ptr<LRScheduler>> schedulers_;
  std::vector<std::int64_t> milestones_;
};

}  // namespace torchfuse::optim
