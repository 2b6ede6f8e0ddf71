// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <torchfuse/export.h>
#include <torchfuse/optim/lr_scheduler.h>

namespace torchfuse::optim {

/// Schedulers one after another, as torch.optim.lr_scheduler.SequentialLR: the first until the
/// first milestone, and so on. At its milestone a scheduler begins with its epoch 0, from the base
/// rates where it has a closed form.
///
///     SequentialLR scheduler(optimizer,
///                            {std::make_shared<LinearLR>(optimizer, 0.1, 1.0, 5),
///                             std::make_shared<CosineAnnealingLR>(optimizer, 95)},
///                            {5});
///
/// The constructor takes back the first steps of the schedulers within, sets the base rates, and
/// makes the first step of the first scheduler again.
class TORCHFUSE_API SequentialLR : public LRScheduler {
 public:
  /// @param optimizer see LRScheduler.
  /// @param schedulers schedulers of this optimizer, at least one. Only the first may be a
  ///   ChainedScheduler or SequentialLR, and none a ReduceLROnPlateau.
  /// @param milestones epochs at which the next one begins, at least 1 and increasing.
  /// @param last_epoch see LRScheduler.
  /// @throws c10::Error for an argument that is not so.
  SequentialLR(torch::optim::Optimizer& optimizer,
               std::vector<std::shared_ptr<LRScheduler>> schedulers,
               std::vector<std::int64_t> milestones, std::int64_t last_epoch = -1);

  /// Steps the scheduler whose turn it is.
  void step() override;

 protected:
  /// `_milestones`, `last_epoch`, `_last_lr` and `_schedulers`.
  void visit_state(LRSchedulerFields& fields) override;
  /// Returns the schedulers within.
  std::vector<std::shared_ptr<LRScheduler>> schedulers() const override { return schedulers_; }

 private:
  void check() const;

  std::vector<std::shared_ptr<LRScheduler>> schedulers_;
  std::vector<std::int64_t> milestones_;
};

}  // namespace torchfuse::optim
