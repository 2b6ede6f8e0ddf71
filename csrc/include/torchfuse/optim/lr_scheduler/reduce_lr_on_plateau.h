// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torchfuse/export.h>
#include <torchfuse/optim/lr_scheduler.h>

namespace torchfuse::optim {

/// ReduceLROnPlateau's options, with names and defaults from
/// torch.optim.lr_scheduler.ReduceLROnPlateau.
struct ReduceLROnPlateauOptions {
  TORCH_ARG(std::string, mode) = "min";            ///< whether "min" or "max" is better
  TORCH_ARG(double, factor) = 0.1;                 ///< multiplies the rate; in [0, 1)
  TORCH_ARG(std::int64_t, patience) = 10;          ///< bad epochs before a reduction, >= 0
  TORCH_ARG(double, threshold) = 1e-4;             ///< minimum improvement, >= 0
  TORCH_ARG(std::string, threshold_mode) = "rel";  ///< "rel" (to the best metric) or "abs"
  TORCH_ARG(std::int64_t, cooldown) = 0;           ///< ignored epochs after a reduction, >= 0
  TORCH_ARG(PerGroup, min_lr) = 0.0;               ///< lowest rate, >= 0
  TORCH_ARG(double, eps) = 1e-8;                   ///< smaller rate changes are ignored; >= 0
};

/// Reduces the rates when a metric has stopped improving, like
/// torch.optim.lr_scheduler.ReduceLROnPlateau: lr = max(lr * factor, min_lr).
///
///     ReduceLROnPlateau scheduler(optimizer, ReduceLROnPlateauOptions().patience(5));
///     scheduler.step(validation_loss);
///
/// A NaN metric is not an improvement. The constructor does not change the rates.
class TORCHFUSE_API ReduceLROnPlateau : public LRScheduler {
 public:
  /// @param optimizer see LRScheduler.
  /// @param options see ReduceLROnPlateauOptions.
  /// @throws c10::Error for an option out of range.
  explicit ReduceLROnPlateau(torch::optim::Optimizer& optimizer,
                             const ReduceLROnPlateauOptions& options = {});

  /// Ends an epoch. On an error, nothing has changed.
  /// @param metric the epoch's metric, for example the validation loss.
  /// @throws c10::Error if groups were added or removed since construction.
  void step(double metric);
  /// Throws, because the scheduler needs a metric.
  void step() override;

 protected:
  /// Visits `factor`, `default_min_lr`, `min_lrs`, `patience`, `cooldown`, `eps`, `last_epoch`,
  /// `_last_lr`, `mode`, `mode_worse`, `threshold`, `threshold_mode`, `best`, `cooldown_counter`
  /// and `num_bad_epochs`.
  void visit_state(LRSchedulerFields& fields) override;

 private:
  bool is_better(double metric) const;
  void reduce();

  double factor_;
  std::optional<double> default_min_lr_;
  std::vector<double> min_lrs_;
  std::int64_t patience_;
  std::int64_t cooldown_;
  double eps_;
  std::string mode_;
  double threshold_;
  std::string threshold_mode_;
  double best_;
  std::int64_t cooldown_counter_ = 0;
  std::int64_t num_bad_epochs_ = 0;
};

}  // namespace torchfuse::optim
