// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchfuse/export.h>
#include <torchfuse/optim/lr_scheduler.h>

namespace torchfuse::optim {

/// OneCycleLR's options, with names and defaults from torch.optim.lr_scheduler.OneCycleLR.
struct OneCycleLROptions {
  /// @param max_lr one rate for all groups, or one per group.
  // NOLINTNEXTLINE(google-explicit-constructor)
  OneCycleLROptions(PerGroup max_lr) : max_lr_(std::move(max_lr)) {}

  TORCH_ARG(PerGroup, max_lr);                          ///< highest rate, >= 0
  TORCH_ARG(std::optional<std::int64_t>, total_steps);  ///< steps in the cycle, >= 1
  TORCH_ARG(std::optional<std::int64_t>, epochs);       ///< instead of total_steps: epochs, >= 1
  TORCH_ARG(std::optional<std::int64_t>, steps_per_epoch);  ///< and steps per epoch, >= 1
  TORCH_ARG(double, pct_start) = 0.3;                       ///< fraction of rising steps, 0 to 1
  TORCH_ARG(std::string, anneal_strategy) = "cos";          ///< "cos" or "linear"
  TORCH_ARG(bool, cycle_momentum) = true;                   ///< cycle momentum opposite to rate
  TORCH_ARG(PerGroup, base_momentum) = 0.85;  ///< momentum at the highest rate, in [0, 1)
  TORCH_ARG(PerGroup, max_momentum) = 0.95;   ///< momentum at the lowest rates, in [0, 1)
  TORCH_ARG(double, div_factor) = 25.0;       ///< first rate is max_lr / div_factor; > 0
  TORCH_ARG(double, final_div_factor) = 1e4;  ///< last rate is first rate / final_div_factor; > 0
  TORCH_ARG(bool, three_phase) = false;       ///< fall to the first rate, then to the last
  TORCH_ARG(std::int64_t, last_epoch) = -1;   ///< see LRScheduler
};

/// Raises the rate once and lowers it once, like torch.optim.lr_scheduler.OneCycleLR. Call step()
/// after every batch. A phase goes from step a to step b and from rate r to rate s. With
/// p = (step - a) / (b - a):
///
///     lr = s + (r - s) / 2 * (1 + cos(pi * p))     (anneal_strategy "cos")
///     lr = r + (s - r) * p                         (anneal_strategy "linear")
///
/// The momentum follows the same formula, but falls while the rate rises.
///
///     OneCycleLR scheduler(optimizer, OneCycleLROptions(0.1).total_steps(10000));
///
/// `cycle_momentum` supports torch's Adam, AdamW, RMSprop and SGD, and torchfuse's optimizers
/// except FusedAdagrad. For any other optimizer, set `cycle_momentum` to false. For optimizers with
/// betas, the momentum is betas[0].
class TORCHFUSE_API OneCycleLR : public LRScheduler {
 public:
  /// @param optimizer see LRScheduler.
  /// @param options see OneCycleLROptions.
  /// @throws c10::Error for an option out of range, if the momentum is to be cycled and the
  ///   optimizer has none, and if pct_start * total_steps is 1, because no step would raise the
  ///   rate.
  OneCycleLR(torch::optim::Optimizer& optimizer, const OneCycleLROptions& options);

 protected:
  /// Computes the formula above. Throws for a step after the last.
  std::vector<double> get_lr(std::int64_t epoch) const override;
  /// Computes the momentum of all groups if `cycle_momentum` is true.
  std::vector<double> get_momentum(std::int64_t epoch) const override;
  /// Adds `total_steps`, `_schedule_phases`, `_anneal_func_type`, `cycle_momentum` and `use_beta1`.
  /// Also adds `max_lrs`, `min_lrs`, `base_momentums` and `max_momentums`, which Python stores in
  /// the optimizer's groups. A state from Python lacks these entries, and the constructor's values
  /// stay.
  void visit_state(LRSchedulerFields& fields) override;

 private:
  /// One phase: the last step, and the names of the first and last rate and momentum.
  struct Phase {
    double end_step;
    std::string start_lr;
    std::string end_lr;
    std::string start_momentum;
    std::string end_momentum;
  };

  void make_phases(double pct_start, bool three_phase);
  void visit_phases(LRSchedulerFields& fields);
  const std::vector<double>& values(const std::string& value_name) const;
  double annealed(double start, double end, double part) const;
  std::vector<double> annealed(std::int64_t epoch, std::string Phase::* start,
                               std::string Phase::* end) const;

  std::int64_t total_steps_;
  std::vector<Phase> phases_;
  std::string anneal_strategy_;
  bool cycle_momentum_;
  bool use_beta1_ = false;
  std::vector<double> max_lrs_;
  std::vector<double> min_lrs_;
  std::vector<double> base_momentums_;
  std::vector<double> max_momentums_;
};

}  // namespace torchfuse::optim
