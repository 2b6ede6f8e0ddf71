// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <torchfuse/export.h>
#include <torchfuse/optim/lr_scheduler.h>

namespace torchfuse::optim {

/// A smaller rate for the first epochs, as torch.optim.lr_scheduler.ConstantLR:
/// lr = base_lr * factor before epoch total_iters, then base_lr.
class TORCHFUSE_API ConstantLR : public LRScheduler {
 public:
  /// @param optimizer see LRScheduler.
  /// @param factor factor of the first epochs, greater than 0 and at most 1. Python takes 0 too and
  ///   divides by it later.
  /// @param total_iters number of these epochs, at least 1.
  /// @param last_epoch see LRScheduler.
  /// @throws c10::Error for an argument out of range.
  explicit ConstantLR(torch::optim::Optimizer& optimizer, double factor = 1.0 / 3.0,
                      std::int64_t total_iters = 5, std::int64_t last_epoch = -1);

 protected:
  /// The recursive form.
  std::vector<double> get_lr(std::int64_t epoch) const override;
  /// The closed form.
  std::optional<std::vector<double>> closed_form_lr(std::int64_t epoch) const override;
  /// Adds `factor` and `total_iters`.
  void visit_state(LRSchedulerFields& fields) override;

 private:
  double factor_;
  std::int64_t total_iters_;
};

/// A line from one factor to another, as torch.optim.lr_scheduler.LinearLR: lr = base_lr *
/// (start_factor + (end_factor - start_factor) * min(epoch, total_iters) / total_iters).
class TORCHFUSE_API LinearLR : public LRScheduler {
 public:
  /// @param optimizer see LRScheduler.
  /// @param start_factor factor of epoch 0, greater than 0 and at most 1.
  /// @param end_factor factor from epoch total_iters on, from 0 to 1.
  /// @param total_iters number of epochs of the line, at least 1.
  /// @param last_epoch see LRScheduler.
  /// @throws c10::Error for an argument out of range.
  explicit LinearLR(torch::optim::Optimizer& optimizer, double start_factor = 1.0 / 3.0,
                    double end_factor = 1.0, std::int64_t total_iters = 5,
                    std::int64_t last_epoch = -1);

 protected:
  /// The recursive form.
  std::vector<double> get_lr(std::int64_t epoch) const override;
  /// The closed form.
  std::optional<std::vector<double>> closed_form_lr(std::int64_t epoch) const override;
  /// Adds `start_factor`, `end_factor` and `total_iters`.
  void visit_state(LRSchedulerFields& fields) override;

 private:
  double start_factor_;
  double end_factor_;
  std::int64_t total_iters_;
};

/// A power that ends at zero, as torch.optim.lr_scheduler.PolynomialLR:
/// lr = base_lr * (1 - min(epoch, total_iters) / total_iters)^power.
class TORCHFUSE_API PolynomialLR : public LRScheduler {
 public:
  /// @param optimizer see LRScheduler.
  /// @param total_iters number of epochs until zero, at least 1.
  /// @param power exponent, finite and at least 0.
  /// @param last_epoch see LRScheduler.
  /// @throws c10::Error for an argument out of range.
  explicit PolynomialLR(torch::optim::Optimizer& optimizer, std::int64_t total_iters = 5,
                        double power = 1.0, std::int64_t last_epoch = -1);

 protected:
  /// The recursive form.
  std::vector<double> get_lr(std::int64_t epoch) const override;
  /// The closed form.
  std::optional<std::vector<double>> closed_form_lr(std::int64_t epoch) const override;
  /// Adds `total_iters` and `power`.
  void visit_state(LRSchedulerFields& fields) override;

 private:
  std::int64_t total_iters_;
  double power_;
};

}  // namespace torchfuse::optim
