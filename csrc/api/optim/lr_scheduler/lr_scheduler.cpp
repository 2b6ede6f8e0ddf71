// SPDX-License-Identifier: BSD-3-Clause
// Common code of the schedulers except their state: base rates, steps and parameter groups.
#include <torchfuse/optim/lr_scheduler.h>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torchfuse/optim/fused_optimizer.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <unordered_map>

#include "api/optim/lr_scheduler/momentum.h"
#include "api/optim/lr_scheduler/rates.h"

namespace torchfuse::optim {
namespace {

std::vector<double> rates_of(torch::optim::Optimizer& optimizer) {
  std::vector<double> rates;
  for (const auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

void set_rates(torch::optim::Optimizer& optimizer, const std::vector<double>& rates) {
  auto& groups = optimizer.param_groups();
  for (std::size_t i = 0; i < groups.size(); ++i) groups[i].options().set_lr(rates[i]);
}

}  // namespace

/// Note [Base rates of an optimizer]
/// Python stores `initial_lr` in the optimizer's groups, so a second scheduler starts from the same
/// base rates, and not from the rates that the first scheduler set for epoch 0. C++ options cannot
/// store `initial_lr`. Instead, an optimizer's schedulers share one object, which is found by the
/// optimizer's address. The address is valid while a scheduler lives, and the last scheduler
/// destroys the object.
struct LRScheduler::InitialRates {
  std::vector<double> rates;

  static std::shared_ptr<InitialRates> of(torch::optim::Optimizer& optimizer) {
    static std::mutex mutex;
    static std::unordered_map<const torch::optim::Optimizer*, std::weak_ptr<InitialRates>> known;
    const std::lock_guard<std::mutex> lock(mutex);
    std::erase_if(known, [](const auto& entry) { return entry.second.expired(); });
    std::weak_ptr<InitialRates>& entry = known[&optimizer];
    std::shared_ptr<InitialRates> found = entry.lock();
    if (found == nullptr) {
      found = std::make_shared<InitialRates>();
      entry = found;
    }
    // The base rates of newly added groups are their current rates.
    const std::vector<double> rates = rates_of(optimizer);
    for (std::size_t i = found->rates.size(); i < rates.size(); ++i) {
      found->rates.push_back(rates[i]);
    }
    return found;
  }
};

LRScheduler::LRScheduler(const char* name, torch::optim::Optimizer& optimizer,
                         std::int64_t last_epoch)
    : last_epoch_(last_epoch), name_(name), optimizer_(optimizer) {
  TORCH_CHECK_VALUE(last_epoch >= -1, name,
                    ": expected last_epoch to be at least 0, or -1 for a new run, got ", last_epoch,
                    ".");
  last_lr_ = rates_of(optimizer);
  for (std::size_t i = 0; i < last_lr_.size(); ++i) {
    TORCH_CHECK_VALUE(std::isfinite(last_lr_[i]) && last_lr_[i] >= 0.0, name,
                      ": expected lr of group ", i, " to be finite and at least 0, got ",
                      last_lr_[i], ". Set lr before constructing the scheduler.");
  }
  initial_ = InitialRates::of(optimizer);
  base_lrs_ = initial_->rates;
}

LRScheduler::~LRScheduler() = default;

std::vector<double>& LRScheduler::initial_lrs() const { return initial_->rates; }

std::vector<double> LRScheduler::current_lrs() const { return rates_of(optimizer_); }

void LRScheduler::check_groups() const {
  const std::size_t count = optimizer_.param_groups().size();
  TORCH_CHECK_VALUE(count == last_lr_.size(), name_, ": expected the optimizer to have ",
                    last_lr_.size(), " parameter groups, as at construction, got ", count,
                    ". Construct a new scheduler after add_param_group().");
}

void LRScheduler::initial_step() {
  step_count_ = 0;
  is_initial_ = true;
  const auto end = c10::make_scope_exit([this] { is_initial_ = false; });
  step();
}

void LRScheduler::step() {
  update_lr(last_epoch_ + 1, /*closed=*/false);
  ++step_count_;
}

void LRScheduler::undo_first_step() {
  const auto inner = schedulers();
  for (const auto& scheduler : inner) scheduler->undo_first_step();
  if (inner.empty()) --last_epoch_;
}

bool LRScheduler::step_if_applied() {
  const auto* fused = dynamic_cast<FusedOptimizer*>(&optimizer_);
  TORCH_CHECK_TYPE(fused != nullptr, name_,
                   ".step_if_applied: expected a torchfuse optimizer, which records skipped steps, "
                   "got another optimizer. Pass the scaler that steps the optimizer.");
  const at::Tensor skipped = fused->last_step_skipped();
  if (!skipped.defined() || skipped.item<double>() != 0.0) return false;
  step();
  return true;
}

void LRScheduler::update_lr(std::int64_t epoch, bool closed) {
  check_groups();
  std::optional<std::vector<double>> rates;
  if (closed) rates = closed_form_lr(epoch);
  if (!rates) rates = get_lr(epoch);
  const std::vector<double> momentum = get_momentum(epoch);
  for (std::size_t i = 0; i < rates->size(); ++i) {
    double& rate = (*rates)[i];
    TORCH_CHECK_VALUE(std::isfinite(rate), name_, ": expected the rate of group ", i, " in epoch ",
                      epoch, " to be finite, got ", rate,
                      ". Correct the scheduler's function or the group's rate.");
    rate = without_rounding_below_zero(rate, std::max(base_lrs_[i], last_lr_[i]));
  }
  set_lrs(*rates);
  if (!momentum.empty()) set_momentum(optimizer_, momentum);
  last_epoch_ = epoch;
}

void LRScheduler::set_lrs(const std::vector<double>& rates) {
  const std::vector<double> before = current_lrs();
  try {
    set_rates(optimizer_, rates);
  } catch (...) {
    set_rates(optimizer_, before);
    throw;
  }
  last_lr_ = current_lrs();
}

void LRScheduler::all_or_nothing(const std::function<void()>& change) {
  const std::vector<double> rates = current_lrs();
  const std::vector<double> momentum = momentum_of(optimizer_);
  const std::vector<double> initial = initial_->rates;
  const auto inner = schedulers();
  std::vector<LRSchedulerState> states;
  for (const auto& scheduler : inner) states.push_back(scheduler->state_dict());
  try {
    change();
  } catch (...) {
    set_rates(optimizer_, rates);
    if (!momentum.empty()) set_momentum(optimizer_, momentum);
    initial_->rates = initial;
    for (std::size_t i = 0; i < inner.size(); ++i) {
      inner[i]->read_state(states[i], name_, /*assign=*/true);
    }
    throw;
  }
}

void LRScheduler::start_from(const std::vector<double>& rates) {
  set_lrs(rates);
  if (initial_.use_count() == 1) initial_->rates = rates;
  base_lrs_ = initial_->rates;
}

std::vector<double> LRScheduler::get_lr(std::int64_t /*epoch*/) const {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, name_, ": expected get_lr() to be overridden, got the base class's function.");
}

std::optional<std::vector<double>> LRScheduler::closed_form_lr(std::int64_t /*epoch*/) const {
  return std::nullopt;
}

std::vector<double> LRScheduler::get_momentum(std::int64_t /*epoch*/) const { return {}; }

std::vector<double> LRScheduler::per_group(const char* option, const PerGroup& values,
                                           const char* range, bool (*valid)(double)) const {
  const std::size_t groups = last_lr_.size();
  const auto* one = std::get_if<double>(&values);
  const std::vector<double> all =
      one != nullptr ? std::vector<double>(groups, *one) : std::get<std::vector<double>>(values);
  TORCH_CHECK_VALUE(all.size() == groups, name_, ": expected ", option,
                    " to be one number or one for each of the ", groups, " parameter groups, got ",
                    all.size(), ".");
  for (std::size_t i = 0; i < groups; ++i) {
    TORCH_CHECK_VALUE(valid(all[i]), name_, ": expected ", option, " of group ", i, " to be ",
                      range, ", got ", all[i], ".");
  }
  return all;
}

}  // namespace torchfuse::optim
