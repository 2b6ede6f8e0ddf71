// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/optim/lr_scheduler/cyclic_lr.h>

#include <cmath>

#include "api/optim/lr_scheduler/momentum.h"
#include "api/optim/lr_scheduler/rates.h"

namespace torchfuse::optim {
namespace {

std::vector<std::string> cycle_modes() { return {"triangular", "triangular2", "exp_range"}; }
std::vector<std::string> scale_modes() { return {"cycle", "iterations"}; }
}  // namespace

CyclicLR::CyclicLR(torch::optim::Optimizer& optimizer, const CyclicLROptions& options)
    : LRScheduler("CyclicLR", optimizer, options.last_epoch()),
      mode_(options.mode()),
      gamma_(options.gamma()),
      scale_fn_(options.scale_fn()),
      scale_mode_(options.scale_mode()),
      cycle_momentum_(options.cycle_momentum()) {
  const std::vector<double> base_lrs =
      per_group("base_lr", options.base_lr(), kRateRange, &is_rate);
  max_lrs_ = per_group("max_lr", options.max_lr(), kRateRange, &is_rate);
  check_count(name(), "step_size_up", options.step_size_up());
  const std::int64_t step_size_down = options.step_size_down().value_or(options.step_size_up());
  check_count(name(), "step_size_down", step_size_down);
  total_size_ = static_cast<double>(options.step_size_up()) + static_cast<double>(step_size_down);
  step_ratio_ = static_cast<double>(options.step_size_up()) / total_size_;
  check_choice(name(), "mode", mode_, cycle_modes());
  check_choice(name(), "scale_mode", scale_mode_, scale_modes());
  check_rate(name(), "gamma", gamma_);
  if (!scale_fn_) scale_mode_ = mode_ == "exp_range" ? "iterations" : "cycle";
  if (cycle_momentum_) {
    use_beta1_ = uses_beta1(optimizer, name());
    base_momentums_ =
        per_group("base_momentum", options.base_momentum(), kBelowOneRange, &is_below_one);
    max_momentums_ =
        per_group("max_momentum", options.max_momentum(), kBelowOneRange, &is_below_one);
  }
  // As in Python, epoch 0 uses the base rates that the optimizer's schedulers share.
  all_or_nothing([&] {
    if (options.last_epoch() == -1) start_from(base_lrs);
    initial_step();
  });
  base_lrs_ = base_lrs;
}

double CyclicLR::scale(double x) const {
  if (scale_fn_) return scale_fn_(x);
  if (mode_ == "triangular") return 1.0;
  return mode_ == "triangular2" ? 1.0 / std::pow(2.0, x - 1.0) : std::pow(gamma_, x);
}

CyclicLR::Place CyclicLR::place(std::int64_t epoch) const {
  const auto step = static_cast<double>(epoch);
  const double cycle = std::floor(1.0 + step / total_size_);
  const double x = 1.0 + step / total_size_ - cycle;
  return {x <= step_ratio_ ? x / step_ratio_ : (x - 1.0) / (step_ratio_ - 1.0),
          scale(scale_mode_ == "cycle" ? cycle : step)};
}

std::vector<double> CyclicLR::get_lr(std::int64_t epoch) const {
  const Place at = place(epoch);
  std::vector<double> rates = base_lrs_;
  for (std::size_t i = 0; i < rates.size(); ++i) {
    rates[i] += (max_lrs_[i] - rates[i]) * at.x * at.scale;
  }
  return rates;
}

std::vector<double> CyclicLR::get_momentum(std::int64_t epoch) const {
  if (!cycle_momentum_) return {};
  const Place at = place(epoch);
  std::vector<double> momentum = max_momentums_;
  for (std::size_t i = 0; i < momentum.size(); ++i) {
    momentum[i] -= (momentum[i] - base_momentums_[i]) * at.x * at.scale;
  }
  return momentum;
}

void CyclicLR::visit_state(LRSchedulerFields& fields) {
  LRScheduler::visit_state(fields);
  fields.numbers("max_lrs", max_lrs_);
  fields.number("total_size", total_size_, "positive", &is_positive);
  fields.number("step_ratio", step_ratio_, kPositiveFractionRange, &is_positive_fraction);
  fields.text("mode", mode_, cycle_modes());
  fields.rate("gamma", gamma_);
  fields.text("scale_mode", scale_mode_, scale_modes());
  fields.constant("_scale_fn_custom", c10::IValue());
  fields.same("cycle_momentum", cycle_momentum_);
  if (!cycle_momentum_) return;
  fields.same("use_beta1", use_beta1_);
  fields.numbers("base_momentums", base_momentums_);
  fields.numbers("max_momentums", max_momentums_);
}

}  // namespace torchfuse::optim
