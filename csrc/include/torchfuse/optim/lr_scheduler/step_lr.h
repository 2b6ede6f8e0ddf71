// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include <torchfuse/export.h>
#include <torchfuse/optim/lr_scheduler.h>

namespace torchfuse::optim {

/// Decays the rate every `step_size` epochs, like torch.optim.lr_scheduler.StepLR:
/// lr = base_lr * gamma^floor(epoch / step_size).
///
///     StepLR scheduler(optimizer, 30, 0.1);
class TORCHFUSE_API StepLR : public LRScheduler {
 public:
  /// @param optimizer see LRScheduler.
  /// @param step_size epochs between two decays, at least 1.
  /// @param gamma decay factor, finite and at least 0 (default 0.1).
  /// @param last_epoch see LRScheduler.
  /// @throws c10::Error for an argument out of range.
  StepLR(torch::optim::Optimizer& optimizer, std::int64_t step_size, double gamma = 0.1,
         std::int64_t last_epoch = -1);

 protected:
  /// Computes the rates recursively.
  std::vector<double> get_lr(std::int64_t epoch) const override;
  /// Computes the rates in closed form.
  std::optional<std::vector<double>> closed_form_lr(std::int64_t epoch) const override;
  /// Adds `step_size` and `gamma`.
  void visit_state(LRSchedulerFields& fields) override;

 private:
  std::int64_t step_size_;
  double gamma_;
};

/// Decays the rate at given epochs, like torch.optim.lr_scheduler.MultiStepLR:
/// lr = base_lr * gamma^(number of milestones <= epoch).
///
///     MultiStepLR scheduler(optimizer, {30, 80}, 0.1);
class TORCHFUSE_API MultiStepLR : public LRScheduler {
 public:
  /// @param optimizer see LRScheduler.
  /// @param milestones epochs at which the rate decays, at least 0 and not decreasing. An epoch
  ///   that is listed twice decays the rate twice.
  /// @param gamma decay factor, finite and at least 0 (default 0.1).
  /// @param last_epoch see LRScheduler.
  /// @throws c10::Error for an argument out of range.
  MultiStepLR(torch::optim::Optimizer& optimizer, const std::vector<std::int64_t>& milestones,
              double gamma = 0.1, std::int64_t last_epoch = -1);

 protected:
  /// Computes the rates recursively.
  std::vector<double> get_lr(std::int64_t epoch) const override;
  /// Computes the rates in closed form.
  std::optional<std::vector<double>> closed_form_lr(std::int64_t epoch) const override;
  /// Adds `milestones` and `gamma`.
  void visit_state(LRSchedulerFields& fields) override;

 private:
  std::map<std::int64_t, std::int64_t> milestones_;  ///< decay counts by epoch
  double gamma_;
};

/// Decays the rate every epoch, like torch.optim.lr_scheduler.ExponentialLR:
/// lr = base_lr * gamma^epoch.
///
///     ExponentialLR scheduler(optimizer, 0.95);
class TORCHFUSE_API ExponentialLR : public LRScheduler {
 public:
  /// @param optimizer see LRScheduler.
  /// @param gamma decay factor, finite and at least 0.
  /// @param last_epoch see LRScheduler.
  /// @throws c10::Error for an argument out of range.
  ExponentialLR(torch::optim::Optimizer& optimizer, double gamma, std::int64_t last_epoch = -1);

 protected:
  /// Computes the rates recursively.
  std::vector<double> get_lr(std::int64_t epoch) const override;
  /// Computes the rates in closed form.
  std::optional<std::vector<double>> closed_form_lr(std::int64_t epoch) const override;
  /// Adds `gamma`.
  void visit_state(LRSchedulerFields& fields) override;

 private:
  double gamma_;
};

}  // namespace torchfuse::optim
