// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/fused_step.h>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torchfuse/device_copy.h>

#include <map>
#include <set>
#include <utility>

#include "ops/check.h"
#include "ops/fused_step/step_engine.h"

namespace torchfuse {

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

/// Lays `tensor` out like `param`, in place: model.to(memory_format=...) moves parameters alone.
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
  tensors.step = impl(slot.step);
  return tensors;
}

bool FusedStep::step(const std::vector<SlotTensors>& slots,
                     const std::vector<std::vector<HyperParam>>& groups,
                     const FusedStepOptions& options) {
  return impl_->planned && impl_->engine.run(slots, groups, options);
}

void FusedStep::step(const std::vector<FusedSlot>& slots,
                     const std::vector<std::vector<HyperParam>>& groups,
                     const FusedStepOptions& options) {
  std::vector<SlotTensors> tensors;
  tensors.reserve(slots.size());
  for (const FusedSlot& slot : slots) tensors.push_back(borrow(slot));
  if (step(tensors, groups, options)) return;
  plan(slots);
  // Laying a state out anew keeps its tensor object, so what was borrowed still stands.
  TORCH_INTERNAL_ASSERT(step(tensors, groups, options), "a fresh plan does not fit its own slots");
}

at::Tensor FusedStep::total_norm() const { return impl_->engine.total_norm(); }

at::Tensor FusedStep::skipped() const { return impl_->engine.skipped(); }

namespace {

/// An element of memory: its storage and its place there.
using Element = std::pair<const void*, std::int64_t>;

// Note [Homes of step counts]
// The step counts of a device lie in buffers of ours, so that a kernel that grows all of them
// touches few lines of memory. A count that has a home keeps it when parameters join: a captured
// graph goes on growing the elements that it saw. A home has one element more than it needs, which
// tells it from a tensor that a checkpoint brought.

/// Whether the step lies in a home that no other step of `taken` has.
bool has_home(const at::Tensor& step, const c10::Device& device, std::set<Element>& taken) {
  if (!step.defined() || step.device() != device || step.scalar_type() != at::kFloat ||
      step.dim() != 0 || !step.has_storage() || step.storage().nbytes() <= sizeof(float)) {
    return false;
  }
  return taken.emplace(step.storage().unsafeGetStorageImpl(), step.storage_offset()).second;
}

}  // namespace

std::vector<at::Tensor> home_steps(const std::vector<at::Tensor>& params,
                                   std::vector<at::Tensor> steps) {
  ops::check_same_length("home_steps", "steps", steps.size(), params.size(), "params");
  std::set<Element> taken;
  std::map<std::string, std::vector<std::size_t>> homeless;  // by device
  for (std::size_t i = 0; i < params.size(); ++i) {
    const c10::Device device = params[i].device();
    if (!has_home(steps[i], device, taken)) homeless[device.str()].push_back(i);
  }
  for (const auto& [name, members] : homeless) {
    const c10::Device device(name);
    // On the device from the start: a copy from or to the host would make it wait.
    const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
    const at::Tensor buffer = at::zeros({static_cast<std::int64_t>(members.size()) + 1}, options);
    for (std::size_t k = 0; k < members.size(); ++k) {
      const at::Tensor& step = steps[members[k]];
      if (!step.defined()) continue;
      TORCH_CHECK(step.numel() == 1, "home_steps: expected steps[", members[k],
                  "] to hold one element, got ", step.numel(), ".");
      buffer[static_cast<std::int64_t>(k)].copy_(to_device(step.reshape({}), device));
    }
    for (std::size_t k = 0; k < members.size(); ++k) {
      steps[members[k]] = buffer.select(0, static_cast<std::int64_t>(k));
    }
  }
  return steps;
}

at::Tensor master_of_remainder(const at::Tensor& param, const at::Tensor& remainder) {
  constexpr const char* kName = "master_of_remainder";
  TORCH_CHECK(param.scalar_type() == at::kBFloat16, kName,
              ": expected param to be of dtype bfloat16, got ", param.scalar_type(), ".");
  TORCH_CHECK(remainder.scalar_type() == at::kShort, kName,
              ": expected remainder to be of dtype int16, got ", remainder.scalar_type(), ".");
  ops::check_same_sizes({kName, "remainder"}, remainder, param, "param");
  // Widening is a shift of the bits.
  const at::Tensor upper = param.detach().to(at::kFloat);
  upper.view(at::kInt).add_(remainder);
  return upper;
}

// Note [Masters follow their parameters]
// A program may write to a 16-bit parameter between steps: clamp it, load weights, average models.
// Its fp32 master would undo that in the next step. The master says more than the parameter only
// where it rounds to the parameter, so elsewhere it is made anew, and where it does round to it
// every bit is kept: a write of the same values, as loading a checkpoint in any order or gathering
// shards, loses nothing. A remainder needs no such care, since it extends the parameter's own bits.
void remake_master(const at::Tensor& param, const at::Tensor& master) {
  constexpr const char* kName = "remake_master";
  const at::NoGradGuard no_grad;
  TORCH_CHECK(param.scalar_type() == at::kBFloat16 || param.scalar_type() == at::kHalf, kName,
              ": expected param to be of dtype float16 or bfloat16, got ", param.scalar_type(),
              ".");
  TORCH_CHECK(master.scalar_type() == at::kFloat, kName,
              ": expected master to be of dtype float32, got ", master.scalar_type(), ".");
  ops::check_same_sizes({kName, "master"}, master, param, "param");
  at::Tensor stale = master.to(param.scalar_type()).ne(param);
  if (param.scalar_type() == at::kBFloat16) {
    // Masters that come from remainders were rounded away from zero where they lie halfway.
    const at::Tensor bits = master.view(at::kInt);
    const at::Tensor away = bits.bitwise_right_shift(16).add_(1).to(at::kShort);
    const at::Tensor halfway = bits.bitwise_and(0xffff).eq(0x8000);
    stale.logical_and_(halfway.logical_and_(away.eq(param.view(at::kShort))).logical_not_());
  }
  master.copy_(at::where(stale, param.to(at::kFloat), master));
}

at::Tensor remainder_of_master(const at::Tensor& master) {
  TORCH_CHECK(master.scalar_type() == at::kFloat,
              "remainder_of_master: expected master to be of dtype float32, got ",
              master.scalar_type(), ".");
  const at::Tensor value = master.detach();
  const at::Tensor bits = value.view(at::kInt);
  at::Tensor lower = bits.bitwise_and(0xffff);
  lower.sub_(lower.ge(0x8000).to(at::kInt).mul_(0x10000));
  // The last bit that the parameter keeps is 0: halfway, it was rounded down.
  const at::Tensor down = lower.eq(-0x8000).logical_and_(bits.bitwise_and(0x10000).eq(0));
  lower.masked_fill_(down, 0x7fff);
  lower.masked_fill_(value.isnan(), 0);
  return lower.to(at::kShort);
}

}  // namespace torchfuse
