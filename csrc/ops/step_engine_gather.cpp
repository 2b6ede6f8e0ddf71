// SPDX-License-Identifier: BSD-3-Clause
// First half of a step: check every slot and gradient and fill the buckets. Nothing is written yet.
#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <utility>

#include "ops/check.h"
#include "ops/step_engine.h"

#if defined(TORCHFUSE_WITH_CUDA)
#include "kernels/cuda/supported_dtypes.h"
#endif

namespace torchfuse::ops {

namespace {

void* memory_of(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : tensor.unsafeGetTensorImpl()->mutable_data();
}

/// `tensor` as one of a parameter's streams: element i of both lies at the same offset.
void check_stream(const Argument& argument, const at::Tensor& tensor, const at::Tensor& param) {
  check_tensor(argument, tensor);
  check_same_device(argument, tensor, param.device(), "params");
  check_same_sizes(argument, tensor, param, "params");
  if (!same_layout(tensor, param)) {
    fail(argument, "have the strides of params, " + c10::str(param.strides()),
         c10::str(tensor.strides()), "Create it with torch.zeros_like(param).");
  }
}

}  // namespace

StepEngine::Planned StepEngine::check_slot(std::size_t index, const FusedSlot& slot) const {
  const char* op = algorithm_->op();
  const auto i = static_cast<std::int64_t>(index);
  const Argument param_argument{op, "params", i};
  const at::Tensor& param = slot.param;
  check_dense(param_argument, param);

  Planned planned;
  planned.key.device = param.device();
  planned.key.param = dtype_of(param_argument, param);
  planned.key.state = planned.key.param;
  planned.contiguous = param.is_contiguous();
  planned.row.param = memory_of(param);
  planned.row.numel = param.numel();
  planned.row.group = static_cast<std::int32_t>(slot.group);

  const std::vector<std::string>& names = algorithm_->state_names();
  check_same_length(op, "states", slot.states.size(), names.size(), "the algorithm's states");
  bool first = true;
  for (std::size_t k = 0; k < slot.states.size(); ++k) {
    const at::Tensor& state = slot.states[k];
    if (!state.defined()) continue;
    const std::string name = names[k] + "s";
    const Argument argument{op, name.c_str(), i};
    check_stream(argument, state, param);
    const kernels::DType dtype = dtype_of(argument, state);
    if (dtype != planned.key.param &&
        (dtype != kernels::DType::kFloat32 || planned.key.param == kernels::DType::kFloat64)) {
      fail(argument, "be of the parameter's dtype or float32", c10::str(state.scalar_type()));
    }
    if (!first && dtype != planned.key.state) {
      fail(argument, "be of the same dtype as the other states", c10::str(state.scalar_type()));
    }
    first = false;
    planned.key.state = dtype;
    planned.row.state[k] = memory_of(state);
  }
  if (slot.master.defined()) {
    const Argument argument{op, "master_params", i};
    check_stream(argument, slot.master, param);
    if (slot.master.scalar_type() != at::kFloat) {
      fail(argument, "be of dtype float32", c10::str(slot.master.scalar_type()));
    }
    if (kernels::size_of(planned.key.param) != 2) {
      fail(argument, "belong to a float16 or bfloat16 parameter", c10::str(param.scalar_type()),
           "Other parameters need no master.");
    }
    planned.key.has_master = true;
    planned.row.master = memory_of(slot.master);
  }
  const Argument step_argument{op, "state_steps", i};
  check_scalar(step_argument, slot.step, at::kFloat);
  check_same_device(step_argument, slot.step, param.device(), "params");
  planned.row.step = static_cast<float*>(memory_of(slot.step));
  return planned;
}

bool StepEngine::unchanged(const FusedSlot& slot, const Planned& planned) const {
  // Strides can change under one address only through a view of the same memory, which a contiguous
  // tensor would show; other layouts are checked in full every time.
  const auto same = [](const at::Tensor& tensor, const void* address, std::int64_t numel) {
    return memory_of(tensor) == address && tensor.numel() == numel && tensor.is_contiguous();
  };
  const std::int64_t numel = planned.row.numel;
  if (!planned.contiguous || !same(slot.param, planned.row.param, numel)) return false;
  if (dtype_of({algorithm_->op(), "params"}, slot.param) != planned.key.param) return false;
  for (std::size_t k = 0; k < slot.states.size(); ++k) {
    const at::Tensor& state = slot.states[k];
    if (!state.defined()) continue;
    if (!same(state, planned.row.state[k], numel)) return false;
    if (dtype_of({algorithm_->op(), "states"}, state) != planned.key.state) return false;
  }
  if (slot.master.defined() && !same(slot.master, planned.row.master, numel)) return false;
  return memory_of(slot.step) == planned.row.step;
}

void StepEngine::plan(std::vector<FusedSlot> slots) {
  std::vector<Planned> planned;
  planned.reserve(slots.size());
  for (std::size_t i = 0; i < slots.size(); ++i) planned.push_back(check_slot(i, slots[i]));
  slots_ = std::move(slots);
  planned_ = std::move(planned);
}

at::Tensor StepEngine::usable_grad(std::size_t index, const Planned& planned,
                                   const at::Tensor& grad) {
  const Argument argument{algorithm_->op(), "grads", static_cast<std::int64_t>(index)};
  const at::Tensor& param = slots_[index].param;
  check_tensor(argument, grad);
  check_same_device(argument, grad, planned.key.device, "params");
  check_same_sizes(argument, grad, param, "params");

  const bool wide = planned.key.param == kernels::DType::kFloat64;
  at::ScalarType dtype = grad.scalar_type();
  if (wide || dtype == at::kDouble) dtype = wide ? at::kDouble : at::kFloat;
#if defined(TORCHFUSE_WITH_CUDA)
  if (planned.key.device.is_cuda() &&
      !kernels::cuda_supports(planned.key.param, dtype_of(argument, grad), planned.key.state,
                              planned.key.has_master)) {
    dtype = wide ? at::kDouble : at::kFloat;
  }
#endif
  if (dtype == grad.scalar_type() && !grad.is_neg() && same_layout(grad, param)) return grad;
  // Another layout or an unusual dtype: a copy in the parameter's layout stands in for this step.
  at::Tensor copy = at::empty_like(param, param.options().dtype(dtype).requires_grad(false));
  copy.copy_(grad);
  converted_.emplace_back(grad, copy);
  return copy;
}

void StepEngine::check_used_states(std::size_t index) const {
  const FusedSlot& slot = slots_[index];
  for (std::size_t k = 0; k < slot.states.size(); ++k) {
    if (slot.states[k].defined() || !algorithm_->uses_state(slot.group, static_cast<int>(k))) {
      continue;
    }
    const std::string name = algorithm_->state_names()[k] + "s";
    fail({algorithm_->op(), name.c_str(), static_cast<std::int64_t>(index)},
         "be a tensor under these hyper-parameters", "none");
  }
}

StepEngine::DeviceWork& StepEngine::work_on(const c10::Device& device) {
  for (DeviceWork& work : work_) {
    if (work.device == device) return work;
  }
  work_.emplace_back();
  work_.back().device = device;
  return work_.back();
}

void StepEngine::gather(const std::vector<std::vector<HyperParam>>& groups,
                        const at::TensorList* grads) {
  buckets_.clear();
  converted_.clear();
  active_.clear();
  for (DeviceWork& work : work_) {
    work.steps.clear();
    work.buckets.clear();
  }
  set_groups(groups, planned_.front().key.device);
  DeviceWork* work = nullptr;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const FusedSlot& slot = slots_[i];
    const at::Tensor& grad = grads != nullptr ? (*grads)[i] : slot.param.mutable_grad();
    if (!grad.defined()) continue;
    if (!unchanged(slot, planned_[i])) planned_[i] = check_slot(i, slot);
    const Planned& planned = planned_[i];
    TORCH_CHECK(slot.group >= 0 && slot.group < static_cast<std::int64_t>(groups.size()),
                algorithm_->op(), ": expected params[", i, "] to belong to one of ", groups.size(),
                " parameter groups, got group ", slot.group, ".");
    check_used_states(i);

    const Argument argument{algorithm_->op(), "grads", static_cast<std::int64_t>(i)};
    at::Tensor held;
    const at::TensorImpl* impl = grad.unsafeGetTensorImpl();
    const bool plain = planned.contiguous && impl->layout() == at::kStrided &&
                       impl->dtype() == slot.param.unsafeGetTensorImpl()->dtype() &&
                       impl->device() == planned.key.device && impl->is_contiguous() &&
                       impl->sizes().equals(slot.param.sizes()) && !grad.is_neg();
    const at::Tensor& usable = plain ? grad : (held = usable_grad(i, planned, grad));
    kernels::TensorRow row = planned.row;
    row.grad = memory_of(usable);
    if (row.numel != 0 && row.grad == nullptr) check_tensor(argument, grad);
    BucketKey key = planned.key;
    key.grad = plain ? key.param : dtype_of(argument, usable);
    if (work == nullptr || work->device != key.device) work = &work_on(key.device);
    work->steps.push_back(row.step);
    active_.push_back(i);
    if (row.numel != 0) buckets_.of(key).add(row);
  }
  for (Bucket& bucket : buckets_.all()) {
    if (!bucket.rows.empty()) work_on(bucket.key.device).buckets.push_back(&bucket);
  }
}

}  // namespace torchfuse::ops
