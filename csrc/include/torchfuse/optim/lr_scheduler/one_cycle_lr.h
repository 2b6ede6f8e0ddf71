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

/// Options of OneCycleLR, with the names and defaults of torch.optim.lr_scheduler.OneCycleLR.
struct OneCycleLROptions {
  /// One rate for all groups, or one for each.
  // NOLINTNEXTLINE(google-explicit-constructor)
  OneCycleLROptions(PerGroup max_lr) : max_lr_(std::move(max_lr)) {}

  TORCH_ARG(PerGroup, max_lr);                              ///< the highest rate, >= 0
  TORCH_ARG(std::optional<std::int64_t>, total_steps);      ///< steps of the cycle, >= 1
  TORCH_ARG(std::optional<std::int64_t>, epochs);           ///< without total_steps: epochs, >= 1
  TORCH_ARG(std::optional<std::int64_t>, steps_per_epoch);  ///< and steps of each, >= 1
  TORCH_ARG(double, pct_start) = 0.3;                       ///< part of the rise, from 0 to 1
  TORCH_ARG(std::string, anneal_strategy) = "cos";          ///< "cos" or "linear"
  TORCH_ARG(bool, cycle_momentum) = true;                   ///< move the momentum against the rate
  TORCH_ARG(PerGroup, base_momentum) = 0.85;  ///< momentum at the highest rate, in [0, 1)
  TORCH_ARG(PerGroup, max_momentum) = 0.95;   ///< momentum at the ends, in [0, 1)
  TORCH_ARG(double, div_factor) = 25.0;       ///< first rate = max_lr / div_factor; > 0
  TORCH_ARG(double, final_div_factor) = 1e4;  ///< last rate = first rate / final_div_factor; > 0
  TORCH_ARG(bool, three_phase) = false;       ///< fall to the first rate, then to the last
  TORCH_ARG(std::int64_t, last_epoch) = -1;   ///< see LRScheduler
};

/// One rise and one fall of the rate, as torch.optim.lr_scheduler.OneCycleLR; call step() after
/// every batch. In a phase from step a to step b, from rate r to rate s, with
/// p = (step - a) / (b - a): lr = s + (r - s) / 2 * (1 + cos(pi * p)), or on a straight line. The
/// momentum falls and rises the same way; of optimizers with betas it is the first of them.
///
///     OneCycleLR scheduler(optimizer, OneCycleLROptions(0.1).total_steps(10000));
///
/// The momentum of torch's Adam, AdamW, RMSprop and SGD and of torchfuse's optimizers but
/// FusedAdagrad can be cycled; with others, `cycle_momentum` must be false.
class TORCHFUSE_API OneCycleLR : public LRScheduler {
 public:
  /// @param optimizer see LRScheduler.
  /// @param options see OneCycleLROptions.
  /// @throws c10::Error for an option out of range, for an optimizer without momentum, and where
  ///   pct_start * total_steps is 1, so that the rise would have no step.
  OneCycleLR(torch::optim::Optimizer& optimizer, const OneCycleLROptions& options);

 protected:
  /// The formula above. Throws for a step after the last.
  std::vector<double> get_lr(std::int64_t epoch) const override;
  /// The momentum of all groups, if it is cycled.
  std::vector<double> get_momentum(std::int64_t epoch) const override;
  /// Adds `total_steps`, `_schedule_phases`, `_anneal_func_type`, `cycle_momentum` and `use_beta1`.
  /// Python keeps the rates in the optimizer's groups, C++ in `max_lrs`, `min_lrs`,
  /// `base_momentums` and `max_momentums`, which a state of Python lacks: then those of the
  /// constructor stay.
  void visit_state(LRSchedulerFields& fields) override;

 private:
  /// What a phase goes between, by name: a rate and a momentum.
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
