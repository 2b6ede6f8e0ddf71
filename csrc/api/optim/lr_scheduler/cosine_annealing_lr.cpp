// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/optim/lr_scheduler/cosine_annealing_lr.h>

#include <c10/util/Exception.h>

#include <cmath>
#include <numbers>

#include "api/optim/lr_scheduler/rates.h"

namespace torchfuse::optim {

// --- CosineAnnealingLR ---------------------------------------------------------------------------

CosineAnnealingLR::CosineAnnealingLR(torch::optim::Optimizer& optimizer, std::int64_t T_max,
                                     double eta_min, std::int64_t last_epoch)
    : LRScheduler("CosineAnnealingLR", optimizer, last_epoch), t_max_(T_max), eta_min_(eta_min) {
  check_count(name(), "T_max", T_max);
  check_rate(name(), "eta_min", eta_min);
  initial_step();
}

std::vector<double> CosineAnnealingLR::get_lr(std::int64_t epoch) const {
  if (is_initial()) return current_lrs();
  std::vector<double> rates = current_lrs();
  const auto t_max = static_cast<double>(t_max_);
  if ((epoch - 1 - t_max_) % (2 * t_max_) == 0) {
    // The previous rate was eta_min, so the recursion below would divide 0 by 0.
    for (std::size_t i = 0; i < rates.size(); ++i) {
      rates[i] += (base_lrs_[i] - eta_min_) * (1.0 - std::cos(std::numbers::pi / t_max)) / 2.0;
    }
    return rates;
  }
  const double now = 1.0 + std::cos(std::numbers::pi * static_cast<double>(epoch) / t_max);
  const double before = 1.0 + std::cos(std::numbers::pi * static_cast<double>(epoch - 1) / t_max);
  return each(rates, [&](double lr) {
    return without_rounding_below_zero(now / before * (lr - eta_min_) + eta_min_, eta_min_);
  });
}

std::optional<std::vector<double>> CosineAnnealingLR::closed_form_lr(std::int64_t epoch) const {
  const double wave =
      1.0 + std::cos(std::numbers::pi * static_cast<double>(epoch) / static_cast<double>(t_max_));
  return each(base_lrs_, [&](double base) { return eta_min_ + (base - eta_min_) * wave / 2.0; });
}

void CosineAnnealingLR::visit_state(LRSchedulerFields& fields) {
  LRScheduler::visit_state(fields);
  fields.integer("T_max", t_max_, 1);
  fields.rate("eta_min", eta_min_);
}

// --- CosineAnnealingWarmRestarts -----------------------------------------------------------------

CosineAnnealingWarmRestarts::CosineAnnealingWarmRestarts(torch::optim::Optimizer& optimizer,
                                                         std::int64_t T_0, std::int64_t T_mult,
                                                         double eta_min, std::int64_t last_epoch)
    : LRScheduler("CosineAnnealingWarmRestarts", optimizer, last_epoch),
      t_0_(T_0),
      t_i_(T_0),
      t_mult_(T_mult),
      eta_min_(eta_min),
      t_cur_(static_cast<double>(last_epoch)) {
  check_count(name(), "T_0", T_0);
  check_count(name(), "T_mult", T_mult);
  check_rate(name(), "eta_min", eta_min);
  initial_step();
}

std::vector<double> CosineAnnealingWarmRestarts::get_lr(std::int64_t /*epoch*/) const {
  const double wave = 1.0 + std::cos(std::numbers::pi * t_cur_ / static_cast<double>(t_i_));
  return each(base_lrs_, [&](double base) { return eta_min_ + (base - eta_min_) * wave / 2.0; });
}

void CosineAnnealingWarmRestarts::step() {
  if (last_epoch_ < 0) {
    step(0.0);
    return;
  }
  check_groups();
  t_cur_ += 1.0;
  if (t_cur_ >= static_cast<double>(t_i_)) {
    t_cur_ = std::fmod(t_cur_, static_cast<double>(t_i_));
    t_i_ *= t_mult_;
  }
  update_lr(last_epoch_ + 1, /*closed=*/false);
}

void CosineAnnealingWarmRestarts::step(double epoch) {
  TORCH_CHECK_VALUE(is_rate(epoch), name(), ".step: expected epoch to be ", kRateRange, ", got ",
                    epoch, ".");
  check_groups();
  const auto t_0 = static_cast<double>(t_0_);
  const auto t_mult = static_cast<double>(t_mult_);
  if (epoch < t_0) {
    t_i_ = t_0_;
    t_cur_ = epoch;
  } else if (t_mult_ == 1) {
    t_cur_ = std::fmod(epoch, t_0);
  } else {
    // Restart n is at the geometric sum T_0 * (T_mult^n - 1) / (T_mult - 1).
    const double restarts =
        std::floor(std::log(epoch / t_0 * (t_mult - 1.0) + 1.0) / std::log(t_mult));
    t_cur_ = epoch - t_0 * (std::pow(t_mult, restarts) - 1.0) / (t_mult - 1.0);
    t_i_ = static_cast<std::int64_t>(t_0 * std::pow(t_mult, restarts));
  }
  update_lr(static_cast<std::int64_t>(std::floor(epoch)), /*closed=*/false);
}

void CosineAnnealingWarmRestarts::visit_state(LRSchedulerFields& fields) {
  LRScheduler::visit_state(fields);
  fields.integer("T_0", t_0_, 1);
  fields.integer("T_i", t_i_, 1);
  fields.integer("T_mult", t_mult_, 1);
  fields.rate("eta_min", eta_min_);
  fields.rate("T_cur", t_cur_);
}

}  // namespace torchfuse::optim
