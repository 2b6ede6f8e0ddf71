// SPDX-License-Identifier: BSD-3-Clause
// Options and slots of fused optimizers. Each class's .cpp file includes this header and
// instantiates FusedOptimizerOf.
#pragma once

#include <array>
#include <charconv>

#include "api/optim/fused_optimizer_archive.h"
#include "api/optim/fused_optimizer_state_dict.h"
#include "api/optim/options_traits.h"

namespace torchfuse::optim {

template <class Options, class State>
FusedOptimizerOf<Options, State>::FusedOptimizerOf(
    const std::vector<torch::optim::OptimizerParamGroup>& param_groups, Options defaults)
    : FusedOptimizer(checked_groups(OptionsTraits<Options>::kName, param_groups),
                     std::make_unique<Options>(defaults)) {
  // These checks run only here, because a schedule may change the values later.
  const auto check_new = [](const torch::optim::OptimizerOptions& options, const auto& owner) {
    using Traits = OptionsTraits<Options>;
    if constexpr (requires(const Options& own) { Traits::check_new(own, owner); }) {
      Traits::check_new(static_cast<const Options&>(options), owner);
    }
  };
  defaults.check(options_name(std::nullopt));
  check_new(defaults, options_name(std::nullopt));
  for (std::size_t group = 0; group < param_groups_.size(); ++group) {
    const auto& options = param_groups_[group].options();
    FusedOptimizerOf::check_options(options, group);
    check_new(options, options_name(group));
  }
}

template <class Options, class State>
FusedOptimizerOf<Options, State>::FusedOptimizerOf(std::vector<torch::Tensor> params,
                                                   Options defaults)
    : FusedOptimizerOf(
          std::vector<torch::optim::OptimizerParamGroup>{
              torch::optim::OptimizerParamGroup(std::move(params))},
          std::move(defaults)) {}

template <class Options, class State>
const char* FusedOptimizerOf<Options, State>::name() const {
  return OptionsTraits<Options>::kName;
}

template <class Options, class State>
const char* FusedOptimizerOf<Options, State>::algorithm() const {
  return OptionsTraits<Options>::kAlgorithm;
}

template <class Options, class State>
void FusedOptimizerOf<Options, State>::check_options(const torch::optim::OptimizerOptions& options,
                                                     std::optional<std::size_t> group) const {
  constexpr const char* kName = OptionsTraits<Options>::kName;
  const auto* own = dynamic_cast<const Options*>(&options);
  TORCH_CHECK_TYPE(own != nullptr, kName, ": expected ", options_name(group), ".options to be ",
                   kName, "Options, got another optimizer's options.");
  own->check(options_name(group));
  if (group.has_value()) {
    check_wide_options(*own, static_cast<const Options&>(defaults()), *group);
    check_storage(kName, options_name(group), *own, param_groups_[*group].params());
  }
}

template <class Options, class State>
std::vector<HyperParam> FusedOptimizerOf<Options, State>::hyper_params(
    const torch::optim::OptimizerOptions& options) const {
  return hyper_params_from(static_cast<const Options&>(options));
}

/// Returns an archive value as text, for messages and comparisons between ranks. Different numbers
/// have different texts.
inline std::string text_of(const c10::IValue& value) {
  if (value.isNone()) return "none";
  if (value.isBool()) return value.toBool() ? "true" : "false";
  if (value.isInt()) return std::to_string(value.toInt());
  if (value.isString()) return value.toStringRef();
  if (value.isTuple()) {
    std::string text;
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      text += (text.empty() ? "(" : ", ") + text_of(element);
    }
    return text + ")";
  }
  std::array<char, 32> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value.toDouble());
  return {digits.data(), end.ptr};
}

template <class Options, class State>
std::string FusedOptimizerOf<Options, State>::describe(
    const torch::optim::OptimizerOptions& options) const {
  std::string text;
  const auto add = [&text](const char* key, const auto& value) {
    text += (text.empty() ? "" : ", ") + std::string(key) + "=" + text_of(to_archive(value));
  };
  visit_all_options(static_cast<const Options&>(options), add);
  return text;
}

template <class Options, class State>
FusedStepOptions FusedOptimizerOf<Options, State>::step_options() const {
  const auto& own = static_cast<const Options&>(defaults());
  FusedStepOptions options;
  options.check_inside = own.skip_non_finite();
  options.max_grad_norm = own.max_grad_norm();
  if constexpr (requires { own.clip_apart(); }) {
    bool any = false;  // also without matrices, which another process may have
    for (const torch::optim::OptimizerParamGroup& group : param_groups_) {
      const auto& held = static_cast<const Options&>(group.options());
      any = any || held.clip_apart();
      options.clip_apart.push_back(held.use_muon() && held.clip_apart());
    }
    if (!any) options.clip_apart.clear();
  }
  if (own.skip_norm_above().has_value()) options.skip_norm_above = *own.skip_norm_above();
  options.write_back_grads = own.write_back_grads();
  options.seed = own.seed();
  if (own.ema_decay().has_value()) {
    options.ema = EmaOptions{*own.ema_decay(), own.ema_warmup(), own.ema_start_step()};
  }
  return options;
}

/// Returns whether the state `index` is created together with the step count. If not, an option may
/// add the state later.
template <class Options, class State>
bool comes_with_step(const Options& own, const State& held, std::size_t index) {
  if constexpr (requires { own.use_muon(); }) {
    const torch::Tensor& other = own.use_muon() ? held.exp_avg() : held.momentum_buffer();
    return uses_state(own, index) && !other.defined();  // else the option was changed
  }
  return uses_state(Options(), index);
}

/// Returns the states that a parameter must have all or none of: "step, exp_avg and exp_avg_sq".
template <class Options, class State>
std::string required_names(const Options& own, const State& held) {
  std::vector<std::string> names{"step"};
  std::size_t index = 0;
  State state;
  OptionsTraits<Options>::states(state, [&](const char* key, const torch::Tensor&) {
    if (comes_with_step(own, held, index++)) names.emplace_back(key);
  });
  std::string text = names.front();
  for (std::size_t i = 1; i < names.size(); ++i) {
    text += (i + 1 == names.size() ? " and " : ", ") + names[i];
  }
  return text;
}

template <class Options, class State>
FusedSlot FusedOptimizerOf<Options, State>::make_slot(
    const at::Tensor& param, const torch::optim::OptimizerParamState* state,
    const torch::optim::OptimizerOptions& options) const {
  using Traits = OptionsTraits<Options>;
  const auto& own = static_cast<const Options&>(options);
  State held;
  if (state != nullptr) held = static_cast<const State&>(*state);
  FusedSlot slot;
  slot.param = param;
  slot.step = held.step();
  if constexpr (kHasStart<Options>) slot.start = held.momentum_start();
  bool whole = true;
  Traits::states(held, [&](const char*, const torch::Tensor& tensor) {
    const std::size_t index = slot.states.size();
    const bool with_step = tensor.defined() == slot.step.defined();
    whole = whole && (with_step || (!tensor.defined() && !comes_with_step(own, held, index)));
    slot.states.push_back(uses_state(own, index) ? tensor : torch::Tensor());
  });
  TORCH_CHECK_VALUE(whole, Traits::kName, ": expected the state of a parameter of sizes ",
                    param.sizes(), " to have all of ", required_names(own, held),
                    ", got only some. Set all of these tensors, or erase the parameter's state.");
  for (std::size_t index = 0; index < slot.states.size(); ++index) {
    if (slot.states[index].defined() || !uses_state(own, index)) continue;
    const bool number = is_tensor_state<Options, State>(index);
    const bool wide = param.scalar_type() == at::kDouble;
    const at::ScalarType dtype =
        number ? (wide ? at::kDouble : at::kFloat) : state_dtype(param, own, index);
    const at::TensorOptions stored = param.options().dtype(dtype).requires_grad(false);
    slot.states[index] = number
                             ? at::zeros({}, stored)
                             : at::zeros_like(param.detach(), stored, at::MemoryFormat::Preserve);
    if constexpr (requires { Traits::begin_state(own, slot, index); }) {
      Traits::begin_state(own, slot, index);
    }
  }
  slot.stochastic_rounding = own.stochastic_rounding();
  if (wants_master(param, own)) {
    slot.master = master_of(param, own, held);
  } else if (param.scalar_type() == at::kFloat || param.scalar_type() == at::kDouble) {
    for (const at::Tensor& left : {held.master_param(), held.param_remainder()}) {
      if (left.defined()) take_master(param, left);  // the model was converted
    }
  }
  slot.ema = ema_of(param, own, held, slot.master);
  return slot;
}

template <class Options, class State>
void FusedOptimizerOf<Options, State>::store_slot(const FusedSlot& slot) {
  std::unique_ptr<torch::optim::OptimizerParamState>& entry =
      state_[slot.param.unsafeGetTensorImpl()];
  if (entry == nullptr) entry = std::make_unique<State>();
  auto& state = static_cast<State&>(*entry);
  state.step(slot.step);
  std::size_t index = 0;
  OptionsTraits<Options>::states(state, [&](const char*, torch::Tensor& tensor) {
    const at::Tensor& stored = slot.states[index++];
    if (stored.defined()) tensor = stored;
  });
  // Drop an unused master, which would be stale when masters are enabled again.
  const bool remainder = slot.master.defined() && slot.master.scalar_type() == at::kShort;
  state.master_param(remainder ? at::Tensor() : slot.master);
  state.param_remainder(remainder ? slot.master : at::Tensor());
  if (slot.ema.defined()) state.ema_param(slot.ema);
  if constexpr (kHasStart<Options>) {
    state.momentum_start(slot.start);
    const bool unused = !slot.states.front().defined() && state.momentum_buffer().defined();
    const double start = slot.start.defined() ? slot.start.item().toDouble() : 0.0;
    if (unused && state.step().item().toDouble() == start) {
      // The buffer had no update yet. Steps without momentum would advance the count past
      // momentum_start, so drop the buffer and create it again later.
      state.momentum_buffer(at::Tensor());
      state.momentum_start(at::Tensor());
    }
  }
}

template <class Options, class State>
bool FusedOptimizerOf<Options, State>::borrow_state(const at::Tensor& param,
                                                    const torch::optim::OptimizerParamState& state,
                                                    const torch::optim::OptimizerOptions& options,
                                                    SlotTensors& slot) const {
  const auto& own = static_cast<const Options&>(options);
  const auto& held = static_cast<const State&>(state);
  const torch::Tensor& master =
      keeps_remainder(param, own) ? held.param_remainder() : held.master_param();
  if (master.defined() != wants_master(param, own) || !held.step().defined()) return false;
  if (master.defined()) slot.master = master.unsafeGetTensorImpl();
  slot.step = held.step().unsafeGetTensorImpl();
  if constexpr (kHasStart<Options>) {
    const torch::Tensor& start = held.momentum_start();
    if (start.defined()) slot.start = start.unsafeGetTensorImpl();
  }
  if (own.ema_decay().has_value()) {
    if (!held.ema_param().defined()) return false;
    slot.ema = held.ema_param().unsafeGetTensorImpl();
  }
  bool whole = true;
  std::size_t index = 0;
  OptionsTraits<Options>::states(held, [&](const char*, const torch::Tensor& tensor) {
    const std::size_t k = index++;
    if (!uses_state(own, k)) return;
    whole = whole && tensor.defined();
    if (tensor.defined()) slot.states[k] = tensor.unsafeGetTensorImpl();
  });
  return whole;
}

template <class Options, class State>
bool FusedOptimizerOf<Options, State>::rounds_stochastically(
    const torch::optim::OptimizerOptions& options) const {
  return static_cast<const Options&>(options).stochastic_rounding();
}

/// Instantiates the class `name`, after its OptionsTraits are specialized.
#define TORCHFUSE_DEFINE_OPTIMIZER(name)                              \
  template struct FusedOptionsOf<name##Options>;                      \
  template struct FusedParamStateOf<name##ParamState, name##Options>; \
  template class FusedOptimizerOf<name##Options, name##ParamState>

}  // namespace torchfuse::optim
