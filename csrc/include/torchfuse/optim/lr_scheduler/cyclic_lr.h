// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchfuse/export.h>
#include <torchfuse/optim/lr_scheduler.h>

namespace torchfuse::optim {

/// Options of CyclicLR, with the names and defaults of torch.optim.lr_scheduler.CyclicLR.
struct CyclicLROptions {
  /// One rate for all groups, or one for each.
  CyclicLROptions(PerGroup base_lr, PerGroup max_lr)
      : base_lr_(std::move(base_lr)), max_lr_(std::move(max_lr)) {}

  TORCH_ARG(PerGroup, base_lr);                            ///< rate at the ends of a cycle, >= 0
  TORCH_ARG(PerGroup, max_lr);                             ///< rate in the middle of a cycle, >= 0
  TORCH_ARG(std::int64_t, step_size_up) = 2000;            ///< steps of the rise, >= 1
  TORCH_ARG(std::optional<std::int64_t>, step_size_down);  ///< of the fall; none: step_size_up
  /// "triangular", "triangular2" (each cycle is half as high as the last) or "exp_range" (the
  /// height is multiplied by gamma in every step).
  TORCH_ARG(std::string, mode) = "triangular";
  TORCH_ARG(double, gamma) = 1.0;  ///< see `mode`; >= 0
  /// Factor of the height instead of the mode's, by cycle or by step; not part of the state.
  TORCH_ARG(std::function<double(double)>, scale_fn);
  TORCH_ARG(std::string, scale_mode) = "cycle";  ///< argument of scale_fn: "cycle" or "iterations"
  TORCH_ARG(bool, cycle_momentum) = true;        ///< move the momentum against the rate
  TORCH_ARG(PerGroup, base_momentum) = 0.8;      ///< momentum in the middle of a cycle, in [0, 1)
  TORCH_ARG(PerGroup, max_momentum) = 0.9;       ///< momentum at the ends of a cycle, in [0, 1)
  TORCH_ARG(std::int64_t, last_epoch) = -1;      ///< see LRScheduler
};

/// Rates that rise and fall in straight lines, as torch.optim.lr_scheduler.CyclicLR; call step()
/// after every batch. With x the place in the cycle, from 0 to 1 and back:
/// lr = base_lr + (max_lr - base_lr) * x * scale. The momentum falls and rises the same way; of
/// optimizers with betas it is the first of them.
///
///     CyclicLR scheduler(optimizer, CyclicLROptions(1e-4, 1e-2).step_size_up(500));
///
/// The momentum of torch's Adam, AdamW, RMSprop and SGD and of torchfuse's optimizers but
/// FusedAdagrad can be cycled; with others, `cycle_momentum` must be false.
class TORCHFUSE_API CyclicLR : public LRScheduler {
 public:
  /// @param optimizer see LRScheduler.
  /// @param options see CyclicLROptions.
  /// @throws c10::Error for an option out of range and for an optimizer without momentum.
  CyclicLR(torch::optim::Optimizer& optimizer, const CyclicLROptions& options);

 protected:
  /// The formula above.
  std::vector<double> get_lr(std::int64_t epoch) const override;
  /// The momentum of all groups, if it is cycled.
  std::vector<double> get_momentum(std::int64_t epoch) const override;
  /// Adds `max_lrs`, `total_size`, `step_ratio`, `mode`, `gamma`, `scale_mode`, `cycle_momentum`,
  /// `use_beta1`, `base_momentums` and `max_momentums`.
  void visit_state(LRSchedulerFields& fields) override;

 private:
  /// The place in a cycle, from 0 to 1 and back, and the factor of the height.
  struct Place {
    double x;
    double scale;
  };

  Place place(std::int64_t epoch) const;
  double scale(double x) const;

  std::vector<double> max_lrs_;
  double total_size_;
  double step_ratio_;
  std::string mode_;
  double gamma_;
  std::function<double(double)> scale_fn_;
  std::string scale_mode_;
  bool cycle_momentum_;
  bool use_beta1_ = false;
  std::vector<double> base_momentums_;
  std::vector<double> max_momentums_;
};

}  // namespace torchfuse::optim
