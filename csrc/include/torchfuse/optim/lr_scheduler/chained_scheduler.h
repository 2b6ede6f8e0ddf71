// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <torchfuse/export.h>
#include <torchfuse/optim/lr_scheduler.h>

namespace torchfuse::optim {

/// Steps several schedulers in every epoch, in order, like
/// torch.optim.lr_scheduler.ChainedScheduler. Every scheduler continues from the rate that the
/// previous scheduler set, so factors multiply.
///
///     ChainedScheduler scheduler({std::make_shared<ConstantLR>(optimizer, 0.1, 20),
///                                 std::make_shared<ExponentialLR>(optimizer, 0.9)});
class TORCHFUSE_API ChainedScheduler : public LRScheduler {
 public:
  /// @param schedulers at least one scheduler, all for the same optimizer, without
  ///   ReduceLROnPlateau.
  /// @throws c10::Error for invalid schedulers.
  explicit ChainedScheduler(std::vector<std::shared_ptr<LRScheduler>> schedulers);

  /// Steps all schedulers. On an error, nothing has changed.
  void step() override;
  /// Returns the first inner scheduler's last epoch.
  std::int64_t last_epoch() const override { return schedulers_.front()->last_epoch(); }

 protected:
  /// Visits `_last_lr` and `_schedulers`.
  void visit_state(LRSchedulerFields& fields) override;
  /// Returns the inner schedulers.
  std::vector<std::shared_ptr<LRScheduler>> schedulers() const override { return schedulers_; }

 private:
  std::vector<std::shared_ptr<LRScheduler>> schedulers_;
};

}  // namespace torchfuse::optim
