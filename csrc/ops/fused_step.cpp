// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/fused_step.h>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torchfuse/device_copy.h>

#include <map>
#include <utility>

#include "ops/check.h"
#include "ops/step_engine.h"

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

const std::vector<std::string>& FusedStep::hyper_param_names() const {
  return impl_->engine.algorithm().hyper_param_names();
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

/// Whether all steps of a device already are different elements of one buffer that nothing else
/// shares with them.
bool homed(const std::vector<at::Tensor>& steps, const std::vector<std::size_t>& members,
           const c10::Device& device) {
  std::map<std::int64_t, bool> seen;
  const void* storage = nullptr;
  for (const std::size_t i : members) {
    const at::Tensor& step = steps[i];
    if (!step.defined() || step.device() != device || step.scalar_type() != at::kFloat ||
        step.dim() != 0 || !step.has_storage()) {
      return false;
    }
    const void* own = step.storage().unsafeGetStorageImpl();
    if (storage == nullptr) storage = own;
    if (own != storage || !seen.emplace(step.storage_offset(), true).second) return false;
  }
  return true;
}

}  // namespace

std::vector<at::Tensor> home_steps(const std::vector<at::Tensor>& params,
                                   std::vector<at::Tensor> steps) {
  ops::check_same_length("home_steps", "steps", steps.size(), params.size(), "params");
  std::map<std::string, std::vector<std::size_t>> by_device;
  for (std::size_t i = 0; i < params.size(); ++i) {
    by_device[params[i].device().str()].push_back(i);
  }
  for (const auto& [name, members] : by_device) {
    const c10::Device device(name);
    if (homed(steps, members, device)) continue;
    // On the device from the start: a copy from or to the host would make it wait.
    const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
    const at::Tensor buffer = at::zeros({static_cast<std::int64_t>(members.size())}, options);
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
