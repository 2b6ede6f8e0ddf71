// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/optim/lr_scheduler/linear_lr.h>

#include <algorithm>
#include <cmath>

#include "api/optim/lr_scheduler/rates.h"

namespace torchfuse::optim {

ConstantLR::ConstantLR(torch::optim::Optimizer& optimizer, double factor, std::int64_t total_iters,
                       std::int64_t last_epoch)
    : LRScheduler("ConstantLR", optimizer, last_epoch), factor_(factor), total_iters_(total_iters) {
  check_number(name(), "factor", factor, kPositiveFractionRange, &is_positive_fraction);
  check_count(name(), "total_iters", total_iters);
  initial_step();
}

std::vector<double> ConstantLR::get_lr(std::int64_t epoch) const {
  if (epoch != 0 && epoch != total_iters_) return current_lrs();
  const double factor = epoch == 0 ? factor_ : 1.0 / factor_;
  return each(current_lrs(), [&](double lr) { return lr * factor; });
}

std::optional<std::vector<double>> ConstantLR::closed_form_lr(std::int64_t epoch) const {
  const double ended = epoch >= total_iters_ ? 1.0 : 0.0;
  const double factor = factor_ + ended * (1.0 - factor_);
  return each(base_lrs_, [&](double base) { return base * factor; });
}

void ConstantLR::visit_state(LRSchedulerFields& fields) {
  LRScheduler::visit_state(fields);
  fields.number("factor", factor_, kPositiveFractionRange, &is_positive_fraction);
  fields.integer("total_iters", total_iters_, 1);
}

LinearLR::LinearLR(torch::optim::Optimizer& optimizer, double start_factor, double end_factor,
                   std::int64_t total_iters, std::int64_t last_epoch)
    : LRScheduler("LinearLR", optimizer, last_epoch),
      start_factor_(start_factor),
      end_factor_(end_factor),
      total_iters_(total_iters) {
  check_number(name(), "start_factor", start_factor, kPositiveFractionRange, &is_positive_fraction);
  check_number(name(), "end_factor", end_factor, kFractionRange, &is_fraction);
  check_count(name(), "total_iters", total_iters);
  initial_step();
}

std::vector<double> LinearLR::get_lr(std::int64_t epoch) const {
  if (epoch == 0) return each(current_lrs(), [&](double lr) { return lr * start_factor_; });
  if (is_initial() || epoch > total_iters_) return current_lrs();
  const double rise = end_factor_ - start_factor_;
  const double before =
      static_cast<double>(total_iters_) * start_factor_ + static_cast<double>(epoch - 1) * rise;
  return each(current_lrs(), [&](double lr) { return lr * (1.0 + rise / before); });
}

std::optional<std::vector<double>> LinearLR::closed_form_lr(std::int64_t epoch) const {
  const auto passed = static_cast<double>(std::min(total_iters_, epoch));
  const double factor =
      start_factor_ + (end_factor_ - start_factor_) * passed / static_cast<double>(total_iters_);
  return each(base_lrs_, [&](double base) { return base * factor; });
}

void LinearLR::visit_state(LRSchedulerFields& fields) {
  LRScheduler::visit_state(fields);
  fields.number("start_factor", start_factor_, kPositiveFractionRange, &is_positive_fraction);
  fields.number("end_factor", end_factor_, kFractionRange, &is_fraction);
  fields.integer("total_iters", total_iters_, 1);
}

PolynomialLR::PolynomialLR(torch::optim::Optimizer& optimizer, std::int64_t total_iters,
                           double power, std::int64_t last_epoch)
    : LRScheduler("PolynomialLR", optimizer, last_epoch), total_iters_(total_iters), power_(power) {
  check_count(name(), "total_iters", total_iters);
  check_rate(name(), "power", power);
  initial_step();
}

std::vector<double> PolynomialLR::get_lr(std::int64_t epoch) const {
  if (is_initial() || epoch > total_iters_) return current_lrs();
  const auto total = static_cast<double>(total_iters_);
  const double left = 1.0 - static_cast<double>(epoch) / total;
  const double left_before = 1.0 - static_cast<double>(epoch - 1) / total;
  const double factor = std::pow(left / left_before, power_);
  return each(current_lrs(), [&](double lr) { return lr * factor; });
}

std::optional<std::vector<double>> PolynomialLR::closed_form_lr(std::int64_t epoch) const {
  const auto passed = static_cast<double>(std::min(total_iters_, epoch));
  const double factor = std::pow(1.0 - passed / static_cast<double>(total_iters_), power_);
  return each(base_lrs_, [&](double base) { return base * factor; });
}

void PolynomialLR::visit_state(LRSchedulerFields& fields) {
  LRScheduler::visit_state(fields);
  fields.integer("total_iters", total_iters_, 1);
  fields.rate("power", power_);
}

}  // namespace torchfuse::optim
