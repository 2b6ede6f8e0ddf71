// SPDX-License-Identifier: BSD-3-Clause
// Common code of the fused optimizers: closures, plans and the scaler's request.
#include <torchfuse/optim/fused_optimizer.h>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torchfuse/masters.h>
#include <torchfuse/step_views.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "fused_optimizer_impl.h"

namespace torchfuse::optim {

using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

namespace {

/// Restores a group's options. Newer torch versions merge options with the defaults, and replace
/// options whose type torch does not know.
void keep_options(const OptimizerParamGroup& given, OptimizerParamGroup& added) {
  if (given.has_options()) added.set_options(given.options().clone());
}

}  // namespace

FusedOptimizer::FusedOptimizer(const std::vector<OptimizerParamGroup>& param_groups,
                               std::unique_ptr<torch::optim::OptimizerOptions> defaults)
    : Optimizer(param_groups, std::move(defaults)), impl_(std::make_shared<Impl>()) {
  for (std::size_t group = 0; group < param_groups.size(); ++group) {
    keep_options(param_groups[group], param_groups_[group]);
  }
}

void FusedOptimizer::add_param_group(const OptimizerParamGroup& param_group) {
  Optimizer::add_param_group(param_group);
  keep_options(param_group, param_groups_.back());
}

FusedOptimizer::~FusedOptimizer() = default;
FusedOptimizer::FusedOptimizer(FusedOptimizer&&) noexcept = default;
FusedOptimizer& FusedOptimizer::operator=(FusedOptimizer&&) noexcept = default;

torch::Tensor FusedOptimizer::step(LossClosure closure) {
  torch::Tensor loss;
  if (closure != nullptr) {
    TORCH_CHECK(!scaling_.has_value(),
                "Closure use is not currently supported if GradScaler is enabled.");
    const at::AutoGradMode enable_grad(true);
    loss = closure();
  }
  const at::NoGradGuard no_grad;
  TORCH_CHECK(impl_ != nullptr, name(), ": expected an optimizer, got a moved-from object.");
  const Exclusive exclusive(impl_->lock, name());
  check_usable("step");
  around_step([this] { fused_update(); });
  return loss;
}

void FusedOptimizer::around_step(const std::function<void()>& update) { update(); }

std::vector<std::string> FusedOptimizer::described_options() const {
  std::vector<std::string> lines;
  for (const OptimizerParamGroup& group : param_groups_) {
    lines.push_back(c10::str("a group of ", group.params().size(), " parameters with ",
                             describe(group.options())));
  }
  lines.push_back("defaults with " + describe(defaults()));
  return lines;
}

const std::vector<OptimizerParamGroup>& FusedOptimizer::groups_with_gradients() const {
  return impl_ == nullptr || !impl_->shards ? param_groups_ : impl_->shards->model_groups;
}

void FusedOptimizer::fused_update() {
  check_options(defaults(), std::nullopt);
  std::vector<std::vector<HyperParam>> groups;
  groups.reserve(param_groups_.size());
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    const auto& options = param_groups_[group].options();
    check_options(options, group);
    groups.push_back(hyper_params(options));
  }
  FusedStepOptions options = step_options();
  if (impl_->skip_norm_above.defined()) options.skip_norm_above = impl_->skip_norm_above;
  options.norm_groups = impl_->norm_groups;
  if (!options.norm_groups.empty()) options.norm_device = norm_device();
  if (scaling_.has_value()) {
    options.grad_scale = scaling_->grad_scale;
    options.found_inf = scaling_->found_inf;
    options.check_inside = options.check_inside || scaling_->check;
    options.found_inf_is_output = scaling_->found_inf_is_output;
  }
  std::optional<FusedStep>& step = impl_->fused_step;
  if (!step.has_value()) step.emplace(algorithm(), std::string(name()) + "::step");
  std::vector<SlotTensors>& slots = impl_->slots;
  const auto release = c10::make_scope_exit([&slots] { slots.clear(); });
  if (!borrow_slots(slots) || !step->step(slots, groups, options)) {
    build_plan();
    TORCH_CHECK(borrow_slots(slots) && step->step(slots, groups, options), name(),
                "::step: the state changed while the step read it. Do not change an optimizer's "
                "state from another thread during a step.");
  }
  if (scaling_.has_value()) scaling_->found_inf_is_output = false;
}

void FusedOptimizer::remake_masters() {
  TORCH_CHECK(impl_ != nullptr, name(), ": expected an optimizer, got a moved-from object.");
  const Exclusive exclusive(impl_->lock, name());
  check_usable("remake_masters");
  for (const OptimizerParamGroup& group : param_groups_) {
    for (const at::Tensor& param : group.params()) {
      const OptimizerParamState* state = find_state(param);
      SlotTensors slot;
      if (state == nullptr || !borrow_state(param, *state, group.options(), slot)) continue;
      if (slot.master == nullptr) continue;
      remake_master(
          param,
          at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
              slot.master)));
    }
  }
}

void FusedOptimizer::set_skip_norm_above(at::Tensor threshold) {
  TORCH_CHECK(impl_ != nullptr, name(), ": expected an optimizer, got a moved-from object.");
  const Exclusive exclusive(impl_->lock, name());
  const auto is_number = [](const at::Tensor& tensor) {
    const bool wide = tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble;
    return wide && tensor.layout() == at::kStrided && !tensor.is_meta() && tensor.numel() == 1;
  };
  TORCH_CHECK_VALUE(!threshold.defined() || is_number(threshold), name(),
                    "::set_skip_norm_above: expected a dense 1-element tensor of dtype Float or "
                    "Double, got sizes ",
                    threshold.sizes(), ", dtype ", threshold.scalar_type(), " and device ",
                    threshold.device(), ".");
  impl_->skip_norm_above = threshold.defined() ? threshold.detach().reshape({}) : at::Tensor();
}

at::Tensor FusedOptimizer::grad_norm() const {
  if (impl_ == nullptr) return {};
  const Exclusive exclusive(impl_->lock, name());
  return impl_->fused_step.has_value() ? impl_->fused_step->total_norm() : at::Tensor();
}

at::Tensor FusedOptimizer::last_step_skipped() const {
  if (impl_ == nullptr) return {};
  const Exclusive exclusive(impl_->lock, name());
  return impl_->fused_step.has_value() ? impl_->fused_step->skipped() : at::Tensor();
}

void FusedOptimizer::invalidate_plan() {
  if (impl_ == nullptr) return;
  if (impl_->fused_step.has_value()) impl_->fused_step->reset();
  impl_->params.clear();
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

/// Fills `slots` in the plan's order. Returns false if the tensors do not match the plan.
bool FusedOptimizer::borrow_slots(std::vector<SlotTensors>& slots) const {
  slots.clear();
  std::size_t next = 0;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    const auto& options = param_groups_[group].options();
    const bool stochastic = rounds_stochastically(options);
    for (const at::Tensor& param : param_groups_[group].params()) {
      if (next == impl_->params.size()) return false;
      const Impl::Param& planned = impl_->params[next++];
      if (planned.group != group) return false;
      const at::Tensor& grad = param.unsafeGetTensorImpl()->grad();
      if (!planned.has_state) {
        if (grad.defined()) return false;
        continue;
      }
      const OptimizerParamState* state = find_state(param);
      if (state == nullptr || planned.stochastic_rounding != stochastic) return false;
      SlotTensors& slot = slots.emplace_back();
      slot.param = param.unsafeGetTensorImpl();
      if (grad.defined()) slot.grad = grad.unsafeGetTensorImpl();
      if (!borrow_state(param, *state, options, slot)) return false;
    }
  }
  return next == impl_->params.size();
}

// Stores states only after the plan has accepted all slots, so that an error changes nothing.
void FusedOptimizer::build_plan() {
  std::vector<FusedSlot> slots;
  std::vector<Impl::Param> planned;
  std::vector<at::Tensor> params;
  std::vector<at::Tensor> steps;
  std::unordered_set<const void*> seen;
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    const auto& options = param_groups_[group].options();
    const auto& group_params = param_groups_[group].params();
    for (std::size_t index = 0; index < group_params.size(); ++index) {
      const at::Tensor& param = group_params[index];
      const OptimizerParamState* state = find_state(param);
      const bool takes_part = param.grad().defined() || state != nullptr;
      planned.push_back({group, takes_part, rounds_stochastically(options)});
      if (!takes_part) continue;
      TORCH_CHECK_VALUE(
          seen.insert(param.unsafeGetTensorImpl()).second, name(), ": expected ",
          options_name(group), ".params[", index,
          "] to be in the parameter groups once, got a duplicate. Remove the duplicate.");
      FusedSlot slot = make_slot(param, state, options);
      slot.group = static_cast<std::int64_t>(group);
      slot.position = static_cast<std::int64_t>(index);
      slot.index = static_cast<std::int64_t>(planned.size()) - 1;
      if (impl_->shards) {
        slot.shard_groups = impl_->shards->groups;
        slot.numbers.first = impl_->shards->first_elements[static_cast<std::size_t>(slot.index)];
        const at::Tensor& whole = impl_->shards->model_groups[group].params()[index];
        slot.whole_sizes = whole.sizes().vec();
        slot.whole_strides = whole.strides().vec();
        if (!slot.shard_groups.empty()) slot.exchange_group = slot.shard_groups.front();
      }
      params.push_back(slot.param);
      steps.push_back(slot.step);
      slots.push_back(std::move(slot));
    }
  }
  steps = step_views(params, std::move(steps));
  for (std::size_t i = 0; i < slots.size(); ++i) slots[i].step = steps[i];
  impl_->fused_step->plan(slots);
  for (const FusedSlot& slot : slots) store_slot(slot);
  impl_->params = std::move(planned);
}

}  // namespace torchfuse::optim
