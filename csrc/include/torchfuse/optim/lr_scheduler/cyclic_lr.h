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

/// CyclicLR's options, with names and defaults from torch.optim.lr_scheduler.CyclicLR.
struct CyclicLROptions {
  /// @param base_lr, max_lr one rate for all groups, or one per group.
  CyclicLROptions(PerGroup base_lr, PerGroup max_lr)
      : base_lr_(std::move(base_lr)), max_lr_(std::move(max_lr)) {}

  TORCH_ARG(PerGroup, base_lr);                            ///< rate at both ends of a cycle, >= 0
  TORCH_ARG(PerGroup, max_lr);                             ///< rate in the middle of a cycle, >= 0
  TORCH_ARG(std::int64_t, step_size_up) = 2000;            ///< rising steps per cycle, >= 1
  TORCH_ARG(std::optional<std::int64_t>, step_size_down);  ///< falling steps (default step_size_up)
  /// Amplitude: "triangular" (constant), "triangular2" (halved every cycle) or "exp_range"
  /// (multiplied by gamma every step).
  TORCH_ARG(std::string, mode) = "triangular";
  TORCH_ARG(double, gamma) = 1.0;  ///< factor for "exp_range", >= 0
  /// Amplitude factor by cycle or step, which replaces `mode`. Not part of the state.
  TORCH_ARG(std::function<double(double)>, scale_fn);
  TORCH_ARG(std::string, scale_mode) = "cycle";  ///< argument of scale_fn: "cycle" or "iterations"
  TORCH_ARG(bool, cycle_momentum) = true;        ///< cycle momentum opposite to rate
  TORCH_ARG(PerGroup, base_momentum) = 0.8;      ///< momentum in the middle of a cycle, in [0, 1)
  TORCH_ARG(PerGroup, max_momentum) = 0.9;       ///< momentum at the ends of a cycle, in [0, 1)
  TORCH_ARG(std::int64_t, last_epoch) = -1;      ///< see LRScheduler
};

/// Raises and lowers the rate linearly in cycles, like torch.optim.lr_scheduler.CyclicLR. Call
/// step() after every batch. In each cycle x goes from 0 to 1 and back, and `scale` is the
/// amplitude:
///
///     lr = base_lr + (max_lr - base_lr) * x * scale
///
/// The momentum follows the same formula, but falls while the rate rises.
///
///     CyclicLR scheduler(optimizer, CyclicLROptions(1e-4, 1e-2).step_size_up(500));
///
/// `cycle_momentum` supports torch's Adam, AdamW, RMSprop and SGD, and torchfuse's optimizers
/// except FusedAdagrad. For any other optimizer, set `cycle_momentum` to false. For optimizers with
/// betas, the momentum is betas[0].
class TORCHFUSE_API CyclicLR : public LRScheduler {
 public:
  /// @param optimizer see LRScheduler.
  /// @param options see CyclicLROptions.
  /// @throws c10::Error for an option out of range, and if the momentum is to be cycled and the
  ///   optimizer has none.
  CyclicLR(torch::optim::Optimizer& optimizer, const CyclicLROptions& options);

 protected:
  /// Computes the formula above.
  std::vector<double> get_lr(std::int64_t epoch) const override;
  /// Computes the momentum of all groups if `cycle_momentum` is true.
  std::vector<double> get_momentum(std::int64_t epoch) const override;
  /// Adds `max_lrs`, `total_size`, `step_ratio`, `mode`, `gamma`, `scale_mode`, `cycle_momentum`,
  /// `use_beta1`, `base_momentums` and `max_momentums`.
  void visit_state(LRSchedulerFields& fields) override;

 private:
  /// Position in a cycle, from 0 to 1 and back, and the amplitude.
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
