// SPDX-License-Identifier: BSD-3-Clause
#include "ops/fused_step/functional_step.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ops/check.h"
#include "ops/fused_step/step_engine.h"

namespace torchfuse::ops {

namespace {

/// A call's arguments by their names in the op's schema.
class NamedArguments {
 public:
  NamedArguments(const c10::FunctionSchema& schema, const torch::jit::Stack& stack)
      : schema_(schema), values_(torch::jit::last(stack, schema.arguments().size())) {}

  const c10::IValue& operator[](const std::string& name) const {
    const std::optional<int> index = schema_.argumentIndexWithName(name);
    TORCH_INTERNAL_ASSERT(index.has_value(), schema_.name(), " has no argument ", name);
    return values_[*index];
  }

 private:
  const c10::FunctionSchema& schema_;
  c10::ArrayRef<c10::IValue> values_;
};

class FunctionalStep {
 public:
  FunctionalStep(std::unique_ptr<Algorithm> algorithm, NamedArguments arguments)
      : engine_(std::move(algorithm)),
        arguments_(arguments),
        params_(arguments["params"].toTensorList()),
        grads_(arguments["grads"].toTensorList()),
        slots_(params_.size()) {
    check_same_length(op(), "grads", grads_.size(), params_.size(), "params");
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (!grads_.get(i).defined()) {
        fail({op(), "grads", static_cast<std::int64_t>(i)}, "be a tensor", "an undefined tensor");
      }
      slots_[i].param = params_.get(i);
    }
  }

  void run() {
    const std::vector<HyperParam> group = hyper_params();
    add_states(group);
    const auto steps = list("state_steps", /*optional=*/false);
    const auto masters = list("master_params", /*optional=*/true);
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      slots_[i].step = steps.get(i);
      if (!masters.empty()) slots_[i].master = masters.get(i);
    }
    check_all_writable();
    FusedStepOptions options;
    options.grad_scale = arguments_["grad_scale"].toOptional<at::Tensor>();
    options.found_inf = arguments_["found_inf"].toOptional<at::Tensor>();
    engine_.plan(slots_);
    std::vector<SlotTensors> tensors;
    tensors.reserve(slots_.size());
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      tensors.push_back(borrow(slots_[i]));
      tensors.back().grad = grads_.get(i).unsafeGetTensorImpl();
    }
    TORCH_INTERNAL_ASSERT(engine_.run(tensors, {group}, options));
  }

 private:
  const char* op() { return engine_.algorithm().op(); }

  /// Returns a list with one tensor per parameter. An optional list may be empty.
  c10::List<at::Tensor> list(const std::string& name, bool optional) {
    c10::List<at::Tensor> tensors = arguments_[name].toTensorList();
    if (!(optional && tensors.empty())) {
      check_same_length(op(), name.c_str(), tensors.size(), slots_.size(), "params");
    }
    return tensors;
  }

  /// Returns the hyper-parameters. The lr_tensor argument, if given, replaces lr. None means
  /// infinity.
  std::vector<HyperParam> hyper_params() {
    std::vector<HyperParam> group;
    for (const HyperParamInfo& info : engine_.algorithm().hyper_params()) {
      const c10::IValue& value = arguments_[info.name];
      const auto tensor = info.name == "lr" ? arguments_["lr_tensor"].toOptional<at::Tensor>()
                                            : std::optional<at::Tensor>();
      if (tensor) {
        group.emplace_back(*tensor);
      } else if (info.is_flag) {
        group.emplace_back(value.toBool() ? 1.0 : 0.0);
      } else {
        group.emplace_back(value.isNone() ? std::numeric_limits<double>::infinity()
                                          : value.toDouble());
      }
    }
    return group;
  }

  /// Adds the states. If these hyper-parameters do not use a state, the state's list may be empty.
  void add_states(const std::vector<HyperParam>& group) {
    const std::vector<std::string>& names = engine_.algorithm().state_names();
    for (std::size_t s = 0; s < names.size(); ++s) {
      const bool optional = !engine_.algorithm().uses_state(group, static_cast<int>(s));
      const auto states = list(names[s] + "s", optional);
      for (std::size_t i = 0; i < slots_.size(); ++i) {
        slots_[i].states.push_back(states.empty() ? at::Tensor() : states.get(i));
      }
    }
  }

  void check_all_writable() {
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      const auto index = static_cast<std::int64_t>(i);
      check_writable({op(), "params", index}, slots_[i].param);
      check_writable({op(), "master_params", index}, slots_[i].master);
      check_writable({op(), "state_steps", index}, slots_[i].step);
      for (const at::Tensor& state : slots_[i].states)
        check_writable({op(), "states", index}, state);
    }
  }

  StepEngine engine_;
  NamedArguments arguments_;
  c10::List<at::Tensor> params_;
  c10::List<at::Tensor> grads_;
  std::vector<FusedSlot> slots_;
};

/// Boxed kernel of every op fused_<algorithm>_. Every call creates a StepEngine.
void functional_step(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  // torchfuse::fused_<algorithm>_
  const std::string prefix = "torchfuse::fused_";
  std::string algorithm = op.schema().name().substr(prefix.size());
  algorithm.pop_back();
  FunctionalStep(make_algorithm(algorithm), NamedArguments(op.schema(), *stack)).run();
  torch::jit::drop(*stack, op.schema().arguments().size());
}

/// The ops' Meta kernel. Writes nothing, and throws for tensors on another device, because the op
/// would not update them.
void trace_step(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  const auto check = [&](const at::Tensor& tensor, const std::string& name) {
    TORCH_CHECK(!tensor.defined() || tensor.is_meta(),
                op.schema().name().substr(std::string("torchfuse::").size()), ": expected ", name,
                " to be on the meta device like the other arguments, got ", tensor.device(), ".");
  };
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (values[i].isTensor()) check(values[i].toTensor(), arguments[i].name());
    if (!values[i].isTensorList()) continue;
    const c10::List<at::Tensor> list = values[i].toTensorList();
    for (std::size_t k = 0; k < list.size(); ++k) {
      check(list.get(k), arguments[i].name() + "[" + std::to_string(k) + "]");
    }
  }
  trace_only(op, keys, stack);
}

}  // namespace

void register_step(torch::Library& library, const char* name) {
  register_op<functional_step, trace_step>(library, name);
}

}  // namespace torchfuse::ops
