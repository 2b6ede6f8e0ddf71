// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <torchfuse/export.h>
#include <torchfuse/optim/lr_scheduler.h>

namespace torchfuse::optim {

/// Schedulers that all step in every epoch, in their order, as
/// torch.optim.lr_scheduler.ChainedScheduler. Recursive forms multiply: each goes on from the rate
/// that the one before has set.
///
///     ChainedScheduler scheduler({std::make_shared<ConstantLR>(optimizer, 0.1, 20),
///                                 std::make_shared<ExponentialLR>(optimizer, 0.9)});
class TORCHFUSE_API ChainedScheduler : public LRScheduler {
 public:
  /// @param schedulers schedulers of one optimizer, at least one, and none a ReduceLROnPlateau.
  /// @throws c10::Error for schedulers that are not so.
  explicit ChainedScheduler(std::vector<std::shared_ptr<LRScheduler>> schedulers);

  /// Steps all schedulers or, on an error, none.
  void step() override;
  /// Returns that of the first scheduler within.
  std::int64_t last_epoch() const override { return schedulers_.front()->last_epoch(); }

 protected:
  /// `_last_lr` and `_schedulers`.
  void visit_state(LRSchedulerFields& fields) override;
  /// Returns the schedulers within.
  std::vector<std::shared_ptr<LRScheduler>> schedulers() const override { return schedulers_; }

 private:
  std::vector<std::shared_ptr<LRScheduler>> schedulers_;
};

}  // namespace torchfuse::optim
