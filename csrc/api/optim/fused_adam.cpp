// SPDX-License-Identifier: BSD-3-Clause
// FusedAdam: its states and its hyper-parameters.
#include <torchfuse/optim/fused_adam.h>

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <memory>
#include <utility>

#include "api/optim/fused_adam_common.h"

namespace torchfuse::optim {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

namespace {

at::Tensor zero_moment(const at::Tensor& param) {
  return at::zeros_like(param.detach(), param.options().dtype(moment_dtype(param)),
                        at::MemoryFormat::Preserve);
}

void check_wide_option(bool same, std::size_t group, const char* option) {
  TORCH_CHECK_VALUE(same, kFusedAdamName, ": expected param_groups[", group, "].", option,
                    " to equal the optimizer's own, got another value. It holds for all groups: "
                    "set it in the defaults and in every group that has options of its own.");
}

}  // namespace

void check_wide_options(const FusedAdamOptions& options, const FusedAdamOptions& wide,
                        std::size_t group) {
  check_wide_option(options.max_grad_norm() == wide.max_grad_norm(), group, "max_grad_norm");
  check_wide_option(options.write_back_grads() == wide.write_back_grads(), group,
                    "write_back_grads");
  check_wide_option(options.skip_non_finite() == wide.skip_non_finite(), group, "skip_non_finite");
}

FusedAdam::FusedAdam(const std::vector<OptimizerParamGroup>& param_groups,
                     FusedAdamOptions defaults)
    : FusedOptimizer(checked_groups(kFusedAdamName, param_groups),
                     std::make_unique<FusedAdamOptions>(defaults)) {
  defaults.check(options_name(std::nullopt));
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    FusedAdam::check_options(param_groups_[group].options(), group);
  }
}

FusedAdam::FusedAdam(std::vector<torch::Tensor> params, FusedAdamOptions defaults)
    : FusedAdam(std::vector<OptimizerParamGroup>{OptimizerParamGroup(std::move(params))},
                std::move(defaults)) {}

const char* FusedAdam::name() const { return kFusedAdamName; }

const char* FusedAdam::algorithm() const { return "adam"; }

void FusedAdam::check_options(const OptimizerOptions& options,
                              std::optional<std::size_t> group) const {
  const auto* adam = dynamic_cast<const FusedAdamOptions*>(&options);
  TORCH_CHECK_TYPE(adam != nullptr, kFusedAdamName, ": expected ", options_name(group),
                   ".options to be FusedAdamOptions, got those of another optimizer.");
  adam->check(options_name(group));
  if (group.has_value()) check_wide_options(*adam, adam_options(defaults()), *group);
}

std::vector<HyperParam> FusedAdam::hyper_params(const OptimizerOptions& options) const {
  const FusedAdamOptions& adam = adam_options(options);
  return {adam.lr(),
          std::get<0>(adam.betas()),
          std::get<1>(adam.betas()),
          adam.eps(),
          adam.weight_decay(),
          static_cast<double>(adam.bias_correction()),
          static_cast<double>(adam.adam_w_mode()),
          static_cast<double>(adam.amsgrad()),
          static_cast<double>(adam.maximize())};
}

FusedStepOptions FusedAdam::step_options() const {
  const FusedAdamOptions& adam = adam_options(defaults());
  FusedStepOptions options;
  options.check_inside = adam.skip_non_finite();
  options.max_grad_norm = adam.max_grad_norm();
  options.write_back_grads = adam.write_back_grads();
  return options;
}

FusedSlot FusedAdam::make_slot(const at::Tensor& param, const OptimizerParamState* state,
                               const OptimizerOptions& options) const {
  const FusedAdamOptions& adam = adam_options(options);
  FusedAdamParamState held;
  if (state != nullptr) held = static_cast<const FusedAdamParamState&>(*state);
  const bool complete = held.exp_avg().defined();
  TORCH_CHECK_VALUE(held.exp_avg_sq().defined() == complete && held.step().defined() == complete,
                    kFusedAdamName, ": expected the state of a parameter of sizes ", param.sizes(),
                    " to have all of step, exp_avg and exp_avg_sq, got some. "
                    "Set all, or erase the parameter's state.");
  const auto moment = [&param](const at::Tensor& tensor) {
    return tensor.defined() ? tensor : zero_moment(param);
  };
  FusedSlot slot;
  slot.param = param;
  slot.states = {moment(held.exp_avg()), moment(held.exp_avg_sq()),
                 adam.amsgrad() ? moment(held.max_exp_avg_sq()) : at::Tensor()};
  slot.step = held.step();
  if (wants_master(param, adam)) {
    slot.master = held.master_param().defined()
                      ? held.master_param()
                      : param.detach().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true,
                                          at::MemoryFormat::Preserve);
  }
  return slot;
}

void FusedAdam::store_slot(const FusedSlot& slot) {
  std::unique_ptr<OptimizerParamState>& entry = state_[slot.param.unsafeGetTensorImpl()];
  if (entry == nullptr) entry = std::make_unique<FusedAdamParamState>();
  auto& state = static_cast<FusedAdamParamState&>(*entry);
  state.step(slot.step).exp_avg(slot.states[0]).exp_avg_sq(slot.states[1]);
  if (slot.states[2].defined()) state.max_exp_avg_sq(slot.states[2]);
  // A master that is no longer wanted is dropped: it would be stale when masters are wanted again.
  state.master_param(slot.master);
}

bool FusedAdam::slot_is_current(const FusedSlot& slot, const OptimizerParamState& state,
                                const OptimizerOptions& options) const {
  const FusedAdamOptions& adam = adam_options(options);
  const auto& held = static_cast<const FusedAdamParamState&>(state);
  const at::Tensor& max = slot.states[2];
  return slot.states[0].is_same(held.exp_avg()) && slot.states[1].is_same(held.exp_avg_sq()) &&
         slot.step.is_same(held.step()) && slot.master.is_same(held.master_param()) &&
         slot.master.defined() == wants_master(slot.param, adam) &&
         max.defined() == adam.amsgrad() && (!max.defined() || max.is_same(held.max_exp_avg_sq()));
}

}  // namespace torchfuse::optim
