// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <torchfuse/export.h>
#include <torchfuse/optim/lr_scheduler.h>

namespace torchfuse::optim {

/// Reduces the rate in the first epochs, like torch.optim.lr_scheduler.ConstantLR:
/// lr = base_lr * factor before epoch total_iters, then base_lr.
///
///     ConstantLR scheduler(optimizer, 0.5, 4);
class TORCHFUSE_API ConstantLR : public LRScheduler {
 public:
  /// @param optimizer see LRScheduler.
  /// @param factor factor in the first epochs, greater than 0 and at most 1 (default 1/3). Python
  ///   also accepts 0, and later divides by 0.
  /// @param total_iters number of epochs with the factor, at least 1 (default 5).
  /// @param last_epoch see LRScheduler.
  /// @throws c10::Error for an argument out of range.
  explicit ConstantLR(torch::optim::Optimizer& optimizer, double factor = 1.0 / 3.0,
                      std::int64_t total_iters = 5, std::int64_t last_epoch = -1);

 protected:
  /// Computes the rates recursively.
  std::vector<double> get_lr(std::int64_t epoch) const override;
  /// Computes the rates in closed form.
  std::optional<std::vector<double>> closed_form_lr(std::int64_t epoch) const override;
  /// Adds `factor` and `total_iters`.
  void visit_state(LRSchedulerFields& fields) override;

 private:
  double factor_;
  std::int64_t total_iters_;
};

/// Changes the rate linearly in the first epochs, like torch.optim.lr_scheduler.LinearLR: lr =
/// base_lr * (start_factor + (end_factor - start_factor) * min(epoch, total_iters) / total_iters).
///
///     LinearLR warmup(optimizer, 0.1, 1.0, 5);
class TORCHFUSE_API LinearLR : public LRScheduler {
 public:
  /// @param optimizer see LRScheduler.
  /// @param start_factor factor in epoch 0, greater than 0 and at most 1 (default 1/3).
  /// @param end_factor factor from epoch total_iters on, from 0 to 1 (default 1).
  /// @param total_iters epoch at which `end_factor` is reached, at least 1 (default 5).
  /// @param last_epoch see LRScheduler.
  /// @throws c10::Error for an argument out of range.
  explicit LinearLR(torch::optim::Optimizer& optimizer, double start_factor = 1.0 / 3.0,
                    double end_factor = 1.0, std::int64_t total_iters = 5,
                    std::int64_t last_epoch = -1);

 protected:
  /// Computes the rates recursively.
  std::vector<double> get_lr(std::int64_t epoch) const override;
  /// Computes the rates in closed form.
  std::optional<std::vector<double>> closed_form_lr(std::int64_t epoch) const override;
  /// Adds `start_factor`, `end_factor` and `total_iters`.
  void visit_state(LRSchedulerFields& fields) override;

 private:
  double start_factor_;
  double end_factor_;
  std::int64_t total_iters_;
};

/// Decays the rate polynomially to zero, like torch.optim.lr_scheduler.PolynomialLR:
/// lr = base_lr * (1 - min(epoch, total_iters) / total_iters)^power.
///
///     PolynomialLR scheduler(optimizer, 100, 2.0);
class TORCHFUSE_API PolynomialLR : public LRScheduler {
 public:
  /// @param optimizer see LRScheduler.
  /// @param total_iters epoch at which the rate is zero, at least 1 (default 5).
  /// @param power exponent, finite and at least 0 (default 1).
  /// @param last_epoch see LRScheduler.
  /// @throws c10::Error for an argument out of range.
  explicit PolynomialLR(torch::optim::Optimizer& optimizer, std::int64_t total_iters = 5,
                        double power = 1.0, std::int64_t last_epoch = -1);

 protected:
  /// Computes the rates recursively.
  std::vector<double> get_lr(std::int64_t epoch) const override;
  /// Computes the rates in closed form.
  std::optional<std::vector<double>> closed_form_lr(std::int64_t epoch) const override;
  /// Adds `total_iters` and `power`.
  void visit_state(LRSchedulerFields& fields) override;

 private:
  std::int64_t total_iters_;
  double power_;
};

}  // namespace torchfuse::optim
