// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/optim/lr_scheduler/reduce_lr_on_plateau.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "api/optim/lr_scheduler/rates.h"

namespace torchfuse::optim {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::vector<std::string> plateau_modes() { return {"min", "max"}; }
std::vector<std::string> threshold_modes() { return {"rel", "abs"}; }
bool is_number(double value) { return !std::isnan(value); }

}  // namespace

ReduceLROnPlateau::ReduceLROnPlateau(torch::optim::Optimizer& optimizer,
                                     const ReduceLROnPlateauOptions& options)
    : LRScheduler("ReduceLROnPlateau", optimizer),
      factor_(options.factor()),
      patience_(options.patience()),
      cooldown_(options.cooldown()),
      eps_(options.eps()),
      mode_(options.mode()),
      threshold_(options.threshold()),
      threshold_mode_(options.threshold_mode()),
      best_(options.mode() == "min" ? kInfinity : -kInfinity) {
  check_number(name(), "factor", factor_, kBelowOneRange, &is_below_one);
  min_lrs_ = per_group("min_lr", options.min_lr(), kRateRange, &is_rate);
  if (const auto* min_lr = std::get_if<double>(&options.min_lr())) default_min_lr_ = *min_lr;
  check_count(name(), "patience", patience_, 0);
  check_count(name(), "cooldown", cooldown_, 0);
  check_rate(name(), "eps", eps_);
  check_rate(name(), "threshold", threshold_);
  check_choice(name(), "mode", mode_, plateau_modes());
  check_choice(name(), "threshold_mode", threshold_mode_, threshold_modes());
  last_epoch_ = 0;
}

void ReduceLROnPlateau::step() {
  TORCH_CHECK_TYPE(false, name(),
                   ".step: expected a metric, got none. Call step(validation_loss).");
}

void ReduceLROnPlateau::step(double metric) {
  check_groups();
  ++last_epoch_;
  if (is_better(metric)) {
    best_ = metric;
    num_bad_epochs_ = 0;
  } else {
    ++num_bad_epochs_;
  }
  if (cooldown_counter_ > 0) {
    --cooldown_counter_;
    num_bad_epochs_ = 0;
  }
  if (num_bad_epochs_ > patience_) {
    reduce();
    cooldown_counter_ = cooldown_;
    num_bad_epochs_ = 0;
  }
  last_lr_ = current_lrs();
}

void ReduceLROnPlateau::reduce() {
  std::vector<double> rates = current_lrs();
  for (std::size_t i = 0; i < rates.size(); ++i) {
    const double reduced = std::max(rates[i] * factor_, min_lrs_[i]);
    if (rates[i] - reduced > eps_) rates[i] = reduced;
  }
  set_lrs(rates);
}

bool ReduceLROnPlateau::is_better(double metric) const {
  const bool relative = threshold_mode_ == "rel";
  if (mode_ == "min") {
    return metric < (relative ? best_ * (1.0 - threshold_) : best_ - threshold_);
  }
  return metric > (relative ? best_ * (threshold_ + 1.0) : best_ + threshold_);
}

void ReduceLROnPlateau::visit_state(LRSchedulerFields& fields) {
  fields.number("factor", factor_, kBelowOneRange, &is_below_one);
  fields.constant("default_min_lr",
                  default_min_lr_ ? c10::IValue(*default_min_lr_) : c10::IValue());
  fields.numbers("min_lrs", min_lrs_);
  fields.integer("patience", patience_, 0);
  fields.integer("cooldown", cooldown_, 0);
  fields.rate("eps", eps_);
  fields.integer("last_epoch", last_epoch_, 0);
  fields.numbers("_last_lr", last_lr_);
  fields.text("mode", mode_, plateau_modes());
  fields.constant("mode_worse", mode_ == "min" ? kInfinity : -kInfinity);
  fields.rate("threshold", threshold_);
  fields.text("threshold_mode", threshold_mode_, threshold_modes());
  fields.number("best", best_, "a number and not NaN", &is_number);
  fields.integer("cooldown_counter", cooldown_counter_, 0);
  fields.integer("num_bad_epochs", num_bad_epochs_, 0);
}

}  // namespace torchfuse::optim
