// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/optim/lr_scheduler/step_lr.h>

#include <ATen/core/Dict.h>
#include <c10/util/Exception.h>

#include <cmath>

#include "api/optim/lr_scheduler/rates.h"

namespace torchfuse::optim {

StepLR::StepLR(torch::optim::Optimizer& optimizer, std::int64_t step_size, double gamma,
               std::int64_t last_epoch)
    : LRScheduler("StepLR", optimizer, last_epoch), step_size_(step_size), gamma_(gamma) {
  check_count(name(), "step_size", step_size);
  check_rate(name(), "gamma", gamma);
  initial_step();
}

std::vector<double> StepLR::get_lr(std::int64_t epoch) const {
  if (epoch == 0 || epoch % step_size_ != 0) return current_lrs();
  return each(current_lrs(), [&](double lr) { return lr * gamma_; });
}

std::optional<std::vector<double>> StepLR::closed_form_lr(std::int64_t epoch) const {
  const double factor = std::pow(gamma_, static_cast<double>(epoch / step_size_));
  return each(base_lrs_, [&](double base) { return base * factor; });
}

void StepLR::visit_state(LRSchedulerFields& fields) {
  LRScheduler::visit_state(fields);
  fields.integer("step_size", step_size_, 1);
  fields.rate("gamma", gamma_);
}

MultiStepLR::MultiStepLR(torch::optim::Optimizer& optimizer,
                         const std::vector<std::int64_t>& milestones, double gamma,
                         std::int64_t last_epoch)
    : LRScheduler("MultiStepLR", optimizer, last_epoch), gamma_(gamma) {
  std::int64_t least = 0;
  for (const std::int64_t milestone : milestones) {
    TORCH_CHECK_VALUE(milestone >= least, name(),
                      ": expected milestones to be at least 0 and not decreasing, got ", milestone,
                      " after ", least, ". Sort the milestones.");
    least = milestone;
    ++milestones_[milestone];
  }
  check_rate(name(), "gamma", gamma);
  initial_step();
}

std::vector<double> MultiStepLR::get_lr(std::int64_t epoch) const {
  const auto decays = milestones_.find(epoch);
  if (decays == milestones_.end()) return current_lrs();
  const double factor = std::pow(gamma_, static_cast<double>(decays->second));
  return each(current_lrs(), [&](double lr) { return lr * factor; });
}

std::optional<std::vector<double>> MultiStepLR::closed_form_lr(std::int64_t epoch) const {
  std::int64_t decays = 0;
  for (const auto& [milestone, count] : milestones_) decays += milestone <= epoch ? count : 0;
  const double factor = std::pow(gamma_, static_cast<double>(decays));
  return each(base_lrs_, [&](double base) { return base * factor; });
}

void MultiStepLR::visit_state(LRSchedulerFields& fields) {
  LRScheduler::visit_state(fields);
  c10::Dict<std::int64_t, std::int64_t> written;
  for (const auto& [milestone, count] : milestones_) written.insert(milestone, count);
  const auto read = [&](const c10::IValue& saved, const std::string& expected, bool assign) {
    auto counts = to_counts(saved);
    bool valid = counts.has_value();
    for (const auto& [milestone, count] : counts.value_or(milestones_)) {
      valid = valid && milestone >= 0 && count >= 1;
    }
    TORCH_CHECK_VALUE(valid, expected, " to map epochs to decay counts, got ", shown(saved), ".");
    if (assign) milestones_ = std::move(*counts);
  };
  fields.entry("milestones", written, read);
  fields.rate("gamma", gamma_);
}

ExponentialLR::ExponentialLR(torch::optim::Optimizer& optimizer, double gamma,
                             std::int64_t last_epoch)
    : LRScheduler("ExponentialLR", optimizer, last_epoch), gamma_(gamma) {
  check_rate(name(), "gamma", gamma);
  initial_step();
}

std::vector<double> ExponentialLR::get_lr(std::int64_t /*epoch*/) const {
  if (is_initial()) return current_lrs();
  return each(current_lrs(), [&](double lr) { return lr * gamma_; });
}

std::optional<std::vector<double>> ExponentialLR::closed_form_lr(std::int64_t epoch) const {
  const double factor = std::pow(gamma_, static_cast<double>(epoch));
  return each(base_lrs_, [&](double base) { return base * factor; });
}

void ExponentialLR::visit_state(LRSchedulerFields& fields) {
  LRScheduler::visit_state(fields);
  fields.rate("gamma", gamma_);
}

}  // namespace torchfuse::optim
