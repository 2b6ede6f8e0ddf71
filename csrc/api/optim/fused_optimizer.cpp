// SPDX-License-Identifier: BSD-3-Clause
// What all fused optimizers share: closures, the plan and its validity, the scaler's request.
#include <torchfuse/optim/fused_optimizer.h>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

namespace torchfuse::optim {

using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

namespace {

/// Newer versions of torch merge a group's options with the defaults, and replace those whose type
/// they do not know.
void keep_options(const OptimizerParamGroup& given, OptimizerParamGroup& added) {
  if (given.has_options()) added.set_options(given.options().clone());
}

}  // namespace

FusedOptimizer::FusedOptimizer(const std::vector<OptimizerParamGroup>& param_groups,
                               std::unique_ptr<torch::optim::OptimizerOptions> defaults)
    : Optimizer(param_groups, std::move(defaults)) {
  for (std::size_t group = 0; group < param_groups.size(); ++group) {
    keep_options(param_groups[group], param_groups_[group]);
  }
}

void FusedOptimizer::add_param_group(const OptimizerParamGroup& param_group) {
  Optimizer::add_param_group(param_group);
  keep_options(param_group, param_groups_.back());
}

FusedOptimizer::~FusedOptimizer() = default;

torch::Tensor FusedOptimizer::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure != nullptr) {
    TORCH_CHECK(!scaling_.has_value(),
                "Closure use is not currently supported if GradScaler is enabled.");
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  const at::NoGradGuard no_grad;

  check_options(defaults(), std::nullopt);
  std::vector<std::vector<HyperParam>> groups;
  groups.reserve(param_groups_.size());
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    const auto& options = param_groups_[group].options();
    check_options(options, group);
    groups.push_back(hyper_params(options));
  }
  if (!has_gradients()) return loss;
  if (!plan_is_valid()) build_plan();

  FusedStepOptions options = step_options();
  if (scaling_.has_value()) {
    options.grad_scale = scaling_->grad_scale;
    options.found_inf = scaling_->found_inf;
    options.check_inside = options.check_inside || scaling_->check;
  }
  fused_step_->step(groups, options);
  return loss;
}

at::Tensor FusedOptimizer::grad_norm() const {
  return fused_step_ == nullptr ? at::Tensor() : fused_step_->total_norm();
}

at::Tensor FusedOptimizer::last_step_skipped() const {
  return fused_step_ == nullptr ? at::Tensor() : fused_step_->skipped();
}

void FusedOptimizer::invalidate_plan() {
  if (fused_step_ != nullptr) fused_step_->reset();
}

std::string FusedOptimizer::options_name(std::optional<std::size_t> group) {
  return group.has_value() ? "param_groups[" + std::to_string(*group) + "]" : "defaults";
}

const std::vector<OptimizerParamGroup>& FusedOptimizer::checked_groups(
    const char* name, const std::vector<OptimizerParamGroup>& param_groups) {
  for (std::size_t group = 0; group < param_groups.size(); ++group) {
    const auto& params = param_groups[group].params();
    for (std::size_t index = 0; index < params.size(); ++index) {
      TORCH_CHECK_VALUE(params[index].defined(), name, ": expected ", options_name(group),
                        ".params[", index, "] to be a tensor, got an undefined one.");
    }
  }
  return param_groups;
}

const OptimizerParamState* FusedOptimizer::find_state(const at::Tensor& param) const {
  const auto entry = state_.find(param.unsafeGetTensorImpl());
  return entry == state_.end() ? nullptr : entry->second.get();
}

bool FusedOptimizer::has_gradients() const {
  for (const OptimizerParamGroup& group : param_groups_) {
    for (const at::Tensor& param : group.params()) {
      if (param.grad().defined()) return true;
    }
  }
  return false;
}

// Slots are in the order of the groups' parameters, so one walk with a cursor compares everything.
bool FusedOptimizer::plan_is_valid() const {
  if (fused_step_ == nullptr || !fused_step_->planned()) return false;
  const std::vector<FusedSlot>& slots = fused_step_->slots();
  std::size_t next = 0;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    const auto& options = param_groups_[group].options();
    for (const at::Tensor& param : param_groups_[group].params()) {
      const bool planned = next < slots.size() && slots[next].param.is_same(param) &&
                           slots[next].group == static_cast<std::int64_t>(group);
      if (!planned) {
        if (param.grad().defined()) return false;
        continue;
      }
      const OptimizerParamState* state = find_state(param);
      if (state == nullptr || !slot_is_current(slots[next], *state, options)) return false;
      ++next;
    }
  }
  return next == slots.size();
}

// States are stored only after the plan accepted all slots: a refused parameter leaves no trace.
void FusedOptimizer::build_plan() {
  if (fused_step_ == nullptr) fused_step_ = std::make_unique<FusedStep>(algorithm());
  std::vector<FusedSlot> slots;
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> steps;
  std::unordered_set<const void*> seen;
  std::int64_t number = -1;  // of the parameter, with a gradient or without
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    const auto& group_params = param_groups_[group].params();
    for (std::size_t index = 0; index < group_params.size(); ++index) {
      ++number;
      const at::Tensor& param = group_params[index];
      const OptimizerParamState* state = find_state(param);
      if (!param.grad().defined() && state == nullptr) continue;
      TORCH_CHECK_VALUE(seen.insert(param.unsafeGetTensorImpl()).second, name(), ": expected ",
                        options_name(group), ".params[", index,
                        "] to be in the parameter groups once, got it a second time. Remove one.");
      FusedSlot slot = make_slot(param, state, param_groups_[group].options());
      slot.group = static_cast<std::int64_t>(group);
      slot.index = number;
      params.push_back(slot.param);
      steps.push_back(slot.step);
      slots.push_back(std::move(slot));
    }
  }
  steps = home_steps(params, std::move(steps));
  for (std::size_t i = 0; i < slots.size(); ++i) slots[i].step = steps[i];
  fused_step_->plan(std::move(slots));
  for (const FusedSlot& slot : fused_step_->slots()) store_slot(slot);
}

}  // namespace torchfuse::optim
