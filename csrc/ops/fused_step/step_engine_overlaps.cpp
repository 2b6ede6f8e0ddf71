// SPDX-License-Identifier: BSD-3-Clause
// Finds tensors of one step that share memory.
//
// Note [Memory of one's own]
// A kernel updates all tensors in parallel. If two tensors share memory, as after `b.data =
// a.data`, one update is lost or both run at once, and results differ between runs. A tensor that a
// step writes fills its memory without gaps, so comparing address intervals is exact. Parameters
// with a gradient are compared in a plan's first step. They are compared again in a step in which a
// parameter has moved, or had no gradient at the last comparison. A parameter that comes to share
// memory later therefore needs no new plan. Step counts may be shared.
#include <algorithm>
#include <string>

#include "ops/check.h"
#include "ops/fused_step/step_engine.h"

namespace torchfuse::ops {

namespace {

// Kinds of operands; kinds from 0 on are states.
constexpr int kParam = -1;
constexpr int kMaster = -2;
constexpr int kEma = -3;
constexpr int kGrad = -4;

/// Returns where a gradient's elements begin. A converted copy begins elsewhere.
const void* memory_of(const c10::TensorImpl* grad) {
  const auto offset = grad->storage_offset() * static_cast<std::int64_t>(grad->itemsize());
  return static_cast<const char*>(grad->unsafe_storage().data()) + offset;
}

}  // namespace

void StepEngine::add_span(std::vector<Span>& spans, const void* memory,
                          const c10::TensorImpl* tensor, Operand operand) {
  if (memory == nullptr || tensor == nullptr) return;
  const auto* begin = static_cast<const char*>(memory);
  const auto bytes = tensor->numel() * static_cast<std::int64_t>(tensor->itemsize());
  spans.push_back({begin, begin + bytes, operand});
}

/// Sorts the spans, and throws if two spans overlap.
void StepEngine::sort_apart(std::vector<Span>& spans) const {
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.begin < b.begin; });
  for (std::size_t n = 1; n < spans.size(); ++n) {
    if (spans[n].begin < spans[n - 1].end) fail_overlap(spans[n - 1].operand, spans[n].operand);
  }
}

/// Returns an operand's name for messages: an op's list, or a tensor of an optimizer's parameter.
std::string StepEngine::operand_name(std::size_t index, int kind) const {
  const bool of_op = caller_.empty();
  if (kind == kParam) return of_op ? "params" : "";
  std::string name = "ema_param";
  if (kind == kGrad) name = "grad";
  if (kind == kMaster)
    name = planned_[index].key.has_remainder ? "param_remainder" : "master_param";
  if (kind >= 0) name = algorithm_->state_names()[static_cast<std::size_t>(kind)];
  return of_op ? name + "s" : name;
}

/// See Note [Memory of one's own].
void StepEngine::check_overlaps() {
  spans_.clear();
  for (std::size_t i = 0; i < planned_.size(); ++i) {
    if (matches_[i] == Match::kNoGrad) continue;
    const SlotTensors& tensors = (*slots_)[i];
    const kernels::TensorRow& row = planned_[i].row;
    add_span(spans_, row.param, tensors.param, {i, kParam});
    add_span(spans_, row.master, tensors.master, {i, kMaster});
    add_span(spans_, row.ema, tensors.ema, {i, kEma});
    for (std::size_t k = 0; k < num_states_; ++k) {
      const void* memory = k < num_elementwise_ ? row.state[k] : row.tensor_state;
      add_span(spans_, memory, tensors.states[k], {i, static_cast<int>(k)});
    }
  }
  sort_apart(spans_);
  for (std::size_t i = 0; i < planned_.size(); ++i) {
    planned_[i].unchecked = matches_[i] == Match::kNoGrad;
  }
}

/// Like check_overlaps(), for gradients that the step writes in place. Compares these gradients
/// with each other and with the parameters and states.
void StepEngine::check_written_grads() const {
  std::vector<Span> spans;
  spans.reserve(active_.size());
  for (const std::size_t i : active_) {
    const c10::TensorImpl* grad = (*slots_)[i].grad;
    const void* memory = planned_[i].row.grad;
    if (memory == memory_of(grad)) add_span(spans, memory, grad, {i, kGrad});
  }
  sort_apart(spans);
  auto other = spans_.begin();
  for (const Span& grad : spans) {
    while (other != spans_.end() && other->end <= grad.begin) ++other;
    if (other != spans_.end() && other->begin < grad.end) {
      fail_overlap(other->operand, grad.operand);
    }
  }
}

void StepEngine::fail_overlap(Operand a, Operand b) const {
  if (a.slot > b.slot) std::swap(a, b);  // for one parameter, the gradient is named first
  const std::string name = operand_name(b.slot, b.kind);
  const std::string other = operand_name(a.slot, a.kind);
  const char* remedy = "Give each parameter its own tensors.";
  if (a.kind == kParam && b.kind == kParam) {
    remedy =
        "Give each its own memory; two modules that share a weight have one parameter, "
        "b.weight = a.weight, and not b.weight.data = a.weight.data.";
  } else if (a.kind == kGrad || b.kind == kGrad) {
    remedy = "Give each parameter its own gradient, or set write_back_grads to False.";
  }
  fail(argument(name.c_str(), name.c_str(), b.slot), "have its own memory",
       "memory that belongs to " + name_of(argument(other.c_str(), other.c_str(), a.slot)), remedy);
}

}  // namespace torchfuse::ops
