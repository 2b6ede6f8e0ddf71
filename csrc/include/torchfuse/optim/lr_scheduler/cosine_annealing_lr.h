// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <torchfuse/export.h>
#include <torchfuse/optim/lr_scheduler.h>

namespace torchfuse::optim {

/// Decays the rate along a half cosine to `eta_min`, and then raises it again, like
/// torch.optim.lr_scheduler.CosineAnnealingLR:
/// lr = eta_min + (base_lr - eta_min) * (1 + cos(pi * epoch / T_max)) / 2.
///
///     CosineAnnealingLR scheduler(optimizer, 100);
class TORCHFUSE_API CosineAnnealingLR : public LRScheduler {
 public:
  /// @param optimizer see LRScheduler.
  /// @param T_max epochs until the minimum rate, at least 1.
  /// @param eta_min minimum rate, finite and at least 0 (default 0).
  /// @param last_epoch see LRScheduler.
  /// @throws c10::Error for an argument out of range.
  CosineAnnealingLR(torch::optim::Optimizer& optimizer, std::int64_t T_max, double eta_min = 0.0,
                    std::int64_t last_epoch = -1);

 protected:
  /// Computes the rates recursively.
  std::vector<double> get_lr(std::int64_t epoch) const override;
  /// Computes the rates in closed form.
  std::optional<std::vector<double>> closed_form_lr(std::int64_t epoch) const override;
  /// Adds `T_max` and `eta_min`.
  void visit_state(LRSchedulerFields& fields) override;

 private:
  std::int64_t t_max_;
  double eta_min_;
};

/// Decays the rate along half cosines with restarts, like
/// torch.optim.lr_scheduler.CosineAnnealingWarmRestarts:
/// lr = eta_min + (base_lr - eta_min) * (1 + cos(pi * T_cur / T_i)) / 2, with T_cur epochs since
/// the last restart, and T_i epochs between the last and the next restart.
///
///     CosineAnnealingWarmRestarts scheduler(optimizer, 10, 2);
class TORCHFUSE_API CosineAnnealingWarmRestarts : public LRScheduler {
 public:
  /// @param optimizer see LRScheduler.
  /// @param T_0 epochs until the first restart, at least 1.
  /// @param T_mult multiplies T_i at every restart; at least 1 (default 1).
  /// @param eta_min minimum rate, finite and at least 0 (default 0).
  /// @param last_epoch see LRScheduler.
  /// @throws c10::Error for an argument out of range.
  CosineAnnealingWarmRestarts(torch::optim::Optimizer& optimizer, std::int64_t T_0,
                              std::int64_t T_mult = 1, double eta_min = 0.0,
                              std::int64_t last_epoch = -1);

  /// Advances to the next epoch.
  void step() override;
  /// Sets the epoch, which may be fractional: `epoch + batch / batches`.
  /// @throws c10::Error for an epoch that is negative, infinite or NaN.
  void step(double epoch);

 protected:
  /// Computes the formula above.
  std::vector<double> get_lr(std::int64_t epoch) const override;
  /// Adds `T_0`, `T_i`, `T_mult`, `eta_min` and `T_cur`.
  void visit_state(LRSchedulerFields& fields) override;

 private:
  std::int64_t t_0_;
  std::int64_t t_i_;
  std::int64_t t_mult_;
  double eta_min_;
  double t_cur_;
};

}  // namespace torchfuse::optim
