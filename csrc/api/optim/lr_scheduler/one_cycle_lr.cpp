// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/optim/lr_scheduler/one_cycle_lr.h>

#include <c10/util/Exception.h>

#include <cmath>
#include <numbers>

#include "api/optim/lr_scheduler/momentum.h"
#include "api/optim/lr_scheduler/rates.h"

namespace torchfuse::optim {
namespace {

std::vector<std::string> anneal_strategies() { return {"cos", "linear"}; }
std::int64_t count_steps(const OneCycleLROptions& options) {
  constexpr const char* kOwner = "OneCycleLR";
  if (options.total_steps()) {
    check_count(kOwner, "total_steps", *options.total_steps());
    return *options.total_steps();
  }
  TORCH_CHECK_VALUE(options.epochs() && options.steps_per_epoch(), kOwner,
                    ": expected total_steps, or both epochs and steps_per_epoch, got neither.");
  check_count(kOwner, "epochs", *options.epochs());
  check_count(kOwner, "steps_per_epoch", *options.steps_per_epoch());
  return *options.epochs() * *options.steps_per_epoch();
}

}  // namespace

OneCycleLR::OneCycleLR(torch::optim::Optimizer& optimizer, const OneCycleLROptions& options)
    : LRScheduler("OneCycleLR", optimizer, options.last_epoch()),
      total_steps_(count_steps(options)),
      anneal_strategy_(options.anneal_strategy()),
      cycle_momentum_(options.cycle_momentum()) {
  check_number(name(), "pct_start", options.pct_start(), kFractionRange, &is_fraction);
  make_phases(options.pct_start(), options.three_phase());
  check_choice(name(), "anneal_strategy", anneal_strategy_, anneal_strategies());
  max_lrs_ = per_group("max_lr", options.max_lr(), kRateRange, &is_rate);
  constexpr const char* kDivisorRange = "finite and greater than 0";
  check_number(name(), "div_factor", options.div_factor(), kDivisorRange, &is_positive);
  check_number(name(), "final_div_factor", options.final_div_factor(), kDivisorRange, &is_positive);
  if (cycle_momentum_) {
    use_beta1_ = uses_beta1(optimizer, name());
    base_momentums_ =
        per_group("base_momentum", options.base_momentum(), kBelowOneRange, &is_below_one);
    max_momentums_ =
        per_group("max_momentum", options.max_momentum(), kBelowOneRange, &is_below_one);
  }
  base_lrs_ = each(max_lrs_, [&](double rate) { return rate / options.div_factor(); });
  min_lrs_ = each(base_lrs_, [&](double rate) { return rate / options.final_div_factor(); });
  all_or_nothing([&] {
    if (options.last_epoch() == -1) initial_lrs() = base_lrs_;
    initial_step();
  });
}

void OneCycleLR::make_phases(double pct_start, bool three_phase) {
  const double rise = pct_start * static_cast<double>(total_steps_);
  const auto last = static_cast<double>(total_steps_ - 1);
  phases_ = {{rise - 1.0, "initial_lr", "max_lr", "max_momentum", "base_momentum"}};
  if (three_phase) {
    phases_.push_back({2.0 * rise - 2.0, "max_lr", "initial_lr", "base_momentum", "max_momentum"});
    phases_.push_back({last, "initial_lr", "min_lr", "max_momentum", "max_momentum"});
  } else {
    phases_.push_back({last, "max_lr", "min_lr", "base_momentum", "max_momentum"});
  }
  TORCH_CHECK_VALUE(rise != 1.0, name(), ": expected pct_start * total_steps not to be 1, got ",
                    pct_start, " * ", total_steps_,
                    ": no step would raise the rate. Choose a larger pct_start.");
}

const std::vector<double>& OneCycleLR::values(const std::string& value_name) const {
  if (value_name == "initial_lr") return base_lrs_;
  if (value_name == "max_lr") return max_lrs_;
  if (value_name == "min_lr") return min_lrs_;
  return value_name == "base_momentum" ? base_momentums_ : max_momentums_;
}

double OneCycleLR::annealed(double start, double end, double part) const {
  if (anneal_strategy_ == "linear") return (end - start) * part + start;
  return end + (start - end) / 2.0 * (std::cos(std::numbers::pi * part) + 1.0);
}

std::vector<double> OneCycleLR::annealed(std::int64_t epoch, std::string Phase::* start,
                                         std::string Phase::* end) const {
  const auto step = static_cast<double>(epoch);
  double begin = 0.0;
  auto phase = phases_.begin();
  for (; phase + 1 != phases_.end() && step > phase->end_step; ++phase) begin = phase->end_step;
  const double part = (step - begin) / (phase->end_step - begin);
  std::vector<double> result = values((*phase).*start);
  const std::vector<double>& ends = values((*phase).*end);
  for (std::size_t i = 0; i < result.size(); ++i) result[i] = annealed(result[i], ends[i], part);
  return result;
}

std::vector<double> OneCycleLR::get_lr(std::int64_t epoch) const {
  TORCH_CHECK_VALUE(epoch <= total_steps_, name(),
                    ".step: expected at most total_steps = ", total_steps_, " steps, got step ",
                    epoch, ".");
  return annealed(epoch, &Phase::start_lr, &Phase::end_lr);
}

std::vector<double> OneCycleLR::get_momentum(std::int64_t epoch) const {
  if (!cycle_momentum_) return {};
  return annealed(epoch, &Phase::start_momentum, &Phase::end_momentum);
}

void OneCycleLR::visit_phases(LRSchedulerFields& fields) {
  std::vector<LRSchedulerState> written;
  for (const Phase& phase : phases_) {
    written.push_back({{"end_step", phase.end_step},
                       {"start_lr", phase.start_lr},
                       {"end_lr", phase.end_lr},
                       {"start_momentum", phase.start_momentum},
                       {"end_momentum", phase.end_momentum}});
  }
  const auto read = [&](const c10::IValue& saved, const std::string& expected, bool assign) {
    const auto states = to_states(saved);
    std::vector<Phase> phases;
    for (const LRSchedulerState& state : states.value_or(std::vector<LRSchedulerState>())) {
      const auto find = [&](const char* key) {
        const auto found = state.find(key);
        return found == state.end() ? c10::IValue() : found->second;
      };
      const auto read_name = [&](const char* key) {
        TORCH_CHECK_VALUE(find(key).isString(), expected, " to hold '", key, "' in phase ",
                          phases.size(), ", got ", shown(find(key)), ".");
        return find(key).toStringRef();
      };
      const auto end_step = to_number(find("end_step"));
      TORCH_CHECK_VALUE(end_step && std::isfinite(*end_step), expected,
                        " to hold 'end_step' in phase ", phases.size(), ", got ",
                        shown(find("end_step")), ".");
      phases.push_back({*end_step, read_name("start_lr"), read_name("end_lr"),
                        read_name("start_momentum"), read_name("end_momentum")});
    }
    TORCH_CHECK_VALUE(phases.size() == 2 || phases.size() == 3, expected,
                      " to be two or three phases, got ", shown(saved), ".");
    if (assign) phases_ = std::move(phases);
  };
  fields.entry("_schedule_phases", to_ivalue(written), read);
}

void OneCycleLR::visit_state(LRSchedulerFields& fields) {
  LRScheduler::visit_state(fields);
  fields.integer("total_steps", total_steps_, 1);
  visit_phases(fields);
  fields.text("_anneal_func_type", anneal_strategy_, anneal_strategies());
  fields.optional_numbers("max_lrs", max_lrs_);
  fields.optional_numbers("min_lrs", min_lrs_);
  fields.same("cycle_momentum", cycle_momentum_);
  if (!cycle_momentum_) return;
  fields.same("use_beta1", use_beta1_);
  fields.optional_numbers("base_momentums", base_momentums_);
  fields.optional_numbers("max_momentums", max_momentums_);
}

}  // namespace torchfuse::optim
