// SPDX-License-Identifier: BSD-3-Clause
// A fused step whose tensors come as lists, for the functional ops: one StepEngine per call.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/algorithm.h"
#include "ops/check.h"
#include "ops/step_engine.h"

namespace torchfuse::ops {

/// Boxed Meta kernel of an op that mutates its arguments and returns nothing: drops the arguments.
inline void trace_only(const c10::OperatorHandle& op, c10::DispatchKeySet,
                       torch::jit::Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
}

/// Registers `implementation` as the kernel of the op torchfuse::`name`, on every backend: empty
/// lists carry no device, and other layouts and devices get our error. An op that returns nothing
/// is traced by its schema alone.
#define TORCHFUSE_REGISTER_STEP_OP(name, implementation)                                        \
  TORCH_LIBRARY_IMPL(torchfuse, CPU, m) { m.impl(name, implementation); }                       \
  TORCH_LIBRARY_IMPL(torchfuse, CUDA, m) { m.impl(name, implementation); }                      \
  TORCH_LIBRARY_IMPL(torchfuse, CompositeExplicitAutograd, m) { m.impl(name, implementation); } \
  TORCH_LIBRARY_IMPL(torchfuse, Meta, m) {                                                      \
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&ops::trace_only>());                \
  }                                                                                             \
  static_assert(true)

/// Calls the op through the dispatcher. `Implementation` gives its signature.
template <auto Implementation, class... Args>
void call_step_op(const char* name, Args&&... args) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(name, "")
                             .typed<std::remove_pointer_t<decltype(Implementation)>>();
  op.call(std::forward<Args>(args)...);
}

/// An op's hyper-parameters as the step takes them: a tensor instead of the number, if there is
/// one; a flag.
inline HyperParam tensor_or(const std::optional<at::Tensor>& tensor, double number) {
  return tensor ? HyperParam(*tensor) : HyperParam(number);
}
inline HyperParam flag(bool value) { return value ? 1.0 : 0.0; }

class FunctionalStep {
 public:
  FunctionalStep(std::unique_ptr<Algorithm> algorithm, at::TensorList params, at::TensorList grads)
      : engine_(std::move(algorithm)), grads_(grads), slots_(params.size()) {
    check_same_length(op(), "grads", grads.size(), params.size(), "params");
    for (std::size_t i = 0; i < params.size(); ++i) {
      if (!grads[i].defined()) {
        fail({op(), "grads", static_cast<std::int64_t>(i)}, "be a tensor", "an undefined tensor");
      }
      slots_[i].param = params[i];
    }
  }

  /// The algorithm's next state. An optional one may be an empty list.
  void add_state(at::TensorList states, bool optional = false) {
    const std::string name = engine_.algorithm().state_names()[num_states_++] + "s";
    if (!(optional && states.empty())) {
      check_same_length(op(), name.c_str(), states.size(), slots_.size(), "params");
    }
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      slots_[i].states.push_back(states.empty() ? at::Tensor() : states[i]);
    }
  }

  void set_steps(at::TensorList steps) {
    check_same_length(op(), "state_steps", steps.size(), slots_.size(), "params");
    for (std::size_t i = 0; i < slots_.size(); ++i) slots_[i].step = steps[i];
  }

  void set_masters(at::TensorList masters) {
    if (masters.empty()) return;
    check_same_length(op(), "master_params", masters.size(), slots_.size(), "params");
    for (std::size_t i = 0; i < slots_.size(); ++i) slots_[i].master = masters[i];
  }

  void run(std::vector<HyperParam> group, const std::optional<at::Tensor>& grad_scale,
           const std::optional<at::Tensor>& found_inf) {
    FusedStepOptions options;
    options.grad_scale = grad_scale;
    options.found_inf = found_inf;
    check_all_writable();
    engine_.plan(slots_);
    std::vector<SlotTensors> tensors;
    tensors.reserve(slots_.size());
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      tensors.push_back(borrow(slots_[i]));
      tensors.back().grad = grads_[i].unsafeGetTensorImpl();
    }
    TORCH_INTERNAL_ASSERT(engine_.run(tensors, {std::move(group)}, options));
  }

 private:
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

  const char* op() { return engine_.algorithm().op(); }

  StepEngine engine_;
  at::TensorList grads_;
  std::vector<FusedSlot> slots_;
  std::size_t num_states_ = 0;
};

}  // namespace torchfuse::ops
