// SPDX-License-Identifier: BSD-3-Clause
// Tensors of one step that share memory.
//
// Note [Memory of one's own]
// A kernel updates all tensors side by side. Where two of them share memory, as after
// `b.data = a.data`, one update is lost or both run at once, and the result differs from run to
// run. What a step writes fills its memory without gaps, so intervals of addresses tell exactly.
// They are compared in the first step of a plan, and where an address is not that of the step
// before: a parameter that comes to share memory later needs no other plan. Step counts may be
// shared: they only differ from torch's then.
#include <algorithm>
#include <string>

#include "ops/check.h"
#include "ops/fused_step/step_engine.h"

namespace torchfuse::ops {

namespace {

/// The memory of an operand, whose kind is below.
struct Span {
  const char* begin;
  const char* end;
  std::size_t slot;
  int kind;
};

// Kinds from 0 on are states.
constexpr int kParam = -1;
constexpr int kMaster = -2;
constexpr int kEma = -3;
constexpr int kGrad = -4;

void add_span(std::vector<Span>& spans, const c10::TensorImpl* tensor, std::size_t slot, int kind) {
  // A parameter without a gradient may have no memory for now, as between two uses under FSDP.
  if (tensor == nullptr || tensor->numel() == 0 || !within_storage(*tensor)) return;
  const auto* memory = static_cast<const char*>(tensor->unsafe_storage().data());
  if (memory == nullptr) return;
  const auto itemsize = static_cast<std::int64_t>(tensor->itemsize());
  const char* const begin = memory + tensor->storage_offset() * itemsize;
  spans.push_back({begin, begin + tensor->numel() * itemsize, slot, kind});
}

}  // namespace

/// The name of an operand in messages: of an op's list, or of what an optimizer's parameter has.
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
void StepEngine::check_overlaps(bool grads_alone, bool with_grads) const {
  std::vector<Span> spans;
  spans.reserve(planned_.size() * (num_states_ + 2));
  for (std::size_t i = 0; i < planned_.size(); ++i) {
    const SlotTensors& tensors = (*slots_)[i];
    if (with_grads) add_span(spans, tensors.grad, i, kGrad);
    if (grads_alone) continue;
    add_span(spans, tensors.param, i, kParam);
    add_span(spans, tensors.master, i, kMaster);
    add_span(spans, tensors.ema, i, kEma);
    for (std::size_t k = 0; k < num_states_; ++k) {
      add_span(spans, tensors.states[k], i, static_cast<int>(k));
    }
  }
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.begin < b.begin; });
  for (std::size_t n = 1; n < spans.size(); ++n) {
    if (spans[n].begin >= spans[n - 1].end) continue;
    fail_overlap({spans[n - 1].slot, spans[n - 1].kind}, {spans[n].slot, spans[n].kind});
  }
}

void StepEngine::fail_overlap(Operand a, Operand b) const {
  if (a.slot > b.slot) std::swap(a, b);
  const std::string name = operand_name(b.slot, b.kind);
  std::string other = operand_name(a.slot, a.kind);
  Argument argument{caller(), name.c_str(), static_cast<std::int64_t>(b.slot)};
  if (caller_.empty()) {
    other += "[" + std::to_string(a.slot) + "]";
  } else {
    argument = {caller(), name.c_str(), positions_[b.slot], planned_[b.slot].row.group};
    other += (other.empty() ? "params[" : " of params[") + std::to_string(positions_[a.slot]) +
             "] of group " + std::to_string(planned_[a.slot].row.group);
  }
  const char* remedy = "Give each parameter tensors of its own.";
  if (a.kind == kParam && b.kind == kParam) {
    remedy =
        "Where two modules share a weight, assign the parameter, b.weight = a.weight, and "
        "not its data.";
  } else if (a.kind == kGrad && b.kind == kGrad) {
    remedy = "Give each parameter a gradient of its own, or set write_back_grads to False.";
  }
  fail(argument, "have memory of its own", "memory that belongs to " + other, remedy);
}

}  // namespace torchfuse::ops
