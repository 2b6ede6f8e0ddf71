// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/fused_step.h>

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <utility>

#include "ops/check.h"
#include "ops/fused_step/step_engine.h"

namespace torchfuse {

bool FusedStepOptions::writes_grads() const {
  if (write_back_grads == WriteBackGrads::kNothing) return false;
  const bool clips = write_back_grads == WriteBackGrads::kClipped && max_grad_norm &&
                     std::isfinite(*max_grad_norm);
  return grad_scale.has_value() || clips;
}

bool FusedStepOptions::clips_apart() const {
  return !clip_apart.empty() && max_grad_norm.has_value();
}

struct FusedStep::Impl {
  Impl(const std::string& algorithm, std::string caller)
      : engine(ops::make_algorithm(algorithm), std::move(caller)) {}

  ops::StepEngine engine;
  bool planned = false;
};

FusedStep::FusedStep(const std::string& algorithm, std::string caller)
    : impl_(std::make_unique<Impl>(algorithm, std::move(caller))) {}
FusedStep::~FusedStep() = default;
FusedStep::FusedStep(FusedStep&&) noexcept = default;
FusedStep& FusedStep::operator=(FusedStep&&) noexcept = default;

const std::vector<HyperParamInfo>& FusedStep::hyper_params() const {
  return impl_->engine.algorithm().hyper_params();
}

const std::vector<std::string>& FusedStep::state_names() const {
  return impl_->engine.algorithm().state_names();
}

std::size_t FusedStep::num_tensor_states() const {
  return impl_->engine.algorithm().num_tensor_states();
}

namespace {

/// Gives `tensor` the layout of `param`, in place, because model.to(memory_format=...) only changes
/// parameters.
void lay_out_like(const at::Tensor& tensor, const at::Tensor& param) {
  if (!tensor.defined() || !param.defined() || tensor.layout() != at::kStrided ||
      !tensor.sizes().equals(param.sizes()) || ops::same_layout(tensor, param) ||
      !ops::within_storage(*tensor.unsafeGetTensorImpl())) {
    return;
  }
  const at::NoGradGuard no_grad;
  const at::Tensor moved = at::empty_like(param.detach(), tensor.options()).copy_(tensor);
  tensor.set_data(moved);
}

}  // namespace

void FusedStep::plan(const std::vector<FusedSlot>& slots) {
  for (const FusedSlot& slot : slots) {
    const std::size_t elementwise = slot.states.size() - num_tensor_states();
    for (std::size_t k = 0; k < elementwise; ++k) lay_out_like(slot.states[k], slot.param);
    lay_out_like(slot.master, slot.param);
    lay_out_like(slot.ema, slot.param);
  }
  impl_->engine.plan(slots);
  impl_->planned = true;
}

bool FusedStep::planned() const { return impl_->planned; }

void FusedStep::reset() {
  impl_->engine.plan({});
  impl_->planned = false;
}

SlotTensors borrow(const FusedSlot& slot) {
  const auto impl = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.unsafeGetTensorImpl() : nullptr;
  };
  SlotTensors tensors;
  tensors.param = impl(slot.param);
  tensors.grad = tensors.param == nullptr ? nullptr : impl(tensors.param->grad());
  TORCH_CHECK(slot.states.size() <= SlotTensors::kMaxStates,
              "borrow: expected slot to have at most ", SlotTensors::kMaxStates, " states, got ",
              slot.states.size(), ".");
  for (std::size_t k = 0; k < slot.states.size(); ++k) tensors.states[k] = impl(slot.states[k]);
  tensors.master = impl(slot.master);
  tensors.ema = impl(slot.ema);
  tensors.step = impl(slot.step);
  tensors.start = impl(slot.start);
  return tensors;
}

bool FusedStep::step(const std::vector<SlotTensors>& slots,
                     const std::vector<std::vector<HyperParam>>& groups,
                     const FusedStepOptions& options) {
  if (!impl_->planned || !impl_->engine.run(slots, groups, options)) return false;
  // A region of autocast that continues after a step would use cached casts of the former
  // parameters.
  at::autocast::clear_cache();
  return true;
}

void FusedStep::step(const std::vector<FusedSlot>& slots,
                     const std::vector<std::vector<HyperParam>>& groups,
                     const FusedStepOptions& options) {
  std::vector<SlotTensors> tensors;
  tensors.reserve(slots.size());
  for (const FusedSlot& slot : slots) tensors.push_back(borrow(slot));
  if (step(tensors, groups, options)) return;
  plan(slots);
  // plan() may change a state's layout but keeps the tensor object, so the borrowed pointers are
  // still valid.
  TORCH_INTERNAL_ASSERT(step(tensors, groups, options), "a fresh plan does not fit its own slots");
}

at::Tensor FusedStep::total_norm() const { return impl_->engine.total_norm(); }

at::Tensor FusedStep::skipped() const { return impl_->engine.skipped(); }

}  // namespace torchfuse
