// SPDX-License-Identifier: BSD-3-Clause
// First half of a step: check every slot and gradient and fill the buckets. Nothing is written yet.
#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "ops/check.h"
#include "ops/step_engine.h"

namespace torchfuse::ops {

namespace {

void* memory_of(c10::TensorImpl* impl) {
  return impl->numel() == 0 ? nullptr : impl->mutable_data();
}

void* memory_of(const at::Tensor& tensor) { return memory_of(tensor.unsafeGetTensorImpl()); }

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

StepEngine::Planned StepEngine::check_slot(std::size_t index, const FusedSlot& slot) {
  const char* op = algorithm_->op();
  const auto i = static_cast<std::int64_t>(index);
  const Argument param_argument{op, "params", i};
  const at::Tensor& param = slot.param;
  check_dense(param_argument, param);

  Planned planned;
  planned.key.device = param.device();
  planned.key.param = dtype_of(param_argument, param);
  planned.key.sharding = sharding_of(slot);
  planned.contiguous = param.is_contiguous();
  planned.add(param);
  planned.row.param = memory_of(param);
  planned.row.numel = param.numel();
  planned.row.group = static_cast<std::int32_t>(slot.group);

  check_states(i, slot, planned);
  check_master(i, slot, planned);
  check_rounding(i, slot, planned);
  planned.num_elementwise = planned.num_streams;
  const Argument step_argument{op, "state_steps", i};
  check_scalar(step_argument, slot.step, at::kFloat);
  check_same_device(step_argument, slot.step, param.device(), "params");
  planned.add(slot.step);
  planned.row.step = static_cast<float*>(memory_of(slot.step));
  check_tensor_state(i, slot, planned);
  return planned;
}

/// States with one entry per element, each of a dtype of its own: that of its name. Absent ones
/// count as stored like the first, so that they do not part what one kernel can update together.
void StepEngine::check_states(std::int64_t i, const FusedSlot& slot, Planned& planned) const {
  const char* op = algorithm_->op();
  const std::vector<std::string>& names = algorithm_->state_names();
  check_same_length(op, "states", slot.states.size(), names.size(), "the algorithm's states");
  const bool wide = planned.key.param == kernels::DType::kFloat64;
  bool first = true;
  planned.key.states.fill(wide ? kernels::DType::kFloat64 : kernels::DType::kFloat32);
  for (std::size_t k = 0; k < names.size() - algorithm_->num_tensor_states(); ++k) {
    const at::Tensor& state = slot.states[k];
    if (!state.defined()) continue;
    const std::string name = names[k] + "s";
    const Argument argument{op, name.c_str(), i};
    check_stream(argument, state, slot.param);
    const kernels::DType dtype = dtype_of(argument, state);
    if ((dtype == kernels::DType::kFloat64) != wide) {
      fail(argument,
           wide ? "be of the parameter's dtype, float64"
                : "be of dtype float32, float16 or bfloat16, as its parameter is not float64",
           c10::str(state.scalar_type()));
    }
    if (first) planned.key.states.fill(dtype);
    first = false;
    planned.key.states[k] = dtype;
    planned.add(state);
    planned.row.state[k] = memory_of(state);
  }
}

void StepEngine::check_master(std::int64_t i, const FusedSlot& slot, Planned& planned) const {
  if (!slot.master.defined()) return;
  const Argument argument{algorithm_->op(), "master_params", i};
  const bool remainder = slot.master.scalar_type() == at::kShort;
  if (!remainder && slot.master.scalar_type() != at::kFloat) {
    fail(argument, "be of dtype float32, or int16 for remainders",
         c10::str(slot.master.scalar_type()));
  }
  // A remainder is no number by itself; the checks ask for the type of one of its size.
  check_stream(argument, remainder ? slot.master.view(at::kBFloat16) : slot.master, slot.param);
  const kernels::DType param = planned.key.param;
  if (remainder && param != kernels::DType::kBFloat16) {
    fail(argument, "be of dtype float32, as only bfloat16 parameters have remainders",
         "Short for a " + c10::str(slot.param.scalar_type()) + " parameter");
  }
  if (kernels::size_of(param) != 2) {
    fail(argument, "belong to a float16 or bfloat16 parameter", c10::str(slot.param.scalar_type()),
         "Other parameters need no master.");
  }
  planned.key.has_master = !remainder;
  planned.key.has_remainder = remainder;
  planned.add(slot.master);
  planned.row.master = memory_of(slot.master);
}

void StepEngine::check_rounding(std::int64_t i, const FusedSlot& slot, Planned& planned) const {
  planned.row.index = slot.index;
  planned.key.stochastic = slot.stochastic_rounding;
  if (!slot.stochastic_rounding) return;
  if (planned.key.param != kernels::DType::kBFloat16) {
    fail({algorithm_->op(), "params", i}, "be of dtype bfloat16 under stochastic rounding",
         c10::str(slot.param.scalar_type()));
  }
  if (slot.master.defined()) {
    fail({algorithm_->op(), "master_params", i}, "be none under stochastic rounding", "a tensor",
         "A parameter with a master loses nothing by rounding.");
  }
}

/// The state that is one number for the whole tensor, if the algorithm has one.
void StepEngine::check_tensor_state(std::int64_t i, const FusedSlot& slot, Planned& planned) const {
  if (algorithm_->num_tensor_states() == 0) return;
  const std::string name = algorithm_->state_names().back() + "s";
  const Argument argument{algorithm_->op(), name.c_str(), i};
  const at::Tensor& state = slot.states.back();
  const bool wide = planned.key.param == kernels::DType::kFloat64;
  check_scalar(argument, state, wide ? at::kDouble : at::kFloat);
  check_same_device(argument, state, planned.key.device, "params");
  planned.add(state);
  planned.row.tensor_state = memory_of(state);
}

void StepEngine::Planned::add(const at::Tensor& tensor) {
  streams[num_streams++] = {tensor.unsafeGetTensorImpl(), memory_of(tensor), tensor.dtype()};
}

/// Strides can change under one address only through another view of the same memory, which a
/// contiguous tensor would show; other layouts are checked in full every time.
bool StepEngine::Planned::unchanged() const {
  if (!contiguous) return false;
  for (std::int32_t k = 0; k < num_elementwise; ++k) {
    c10::TensorImpl* impl = streams[k].impl;
    if (impl->numel() != row.numel || !impl->is_contiguous()) return false;
    if (impl->dtype() != streams[k].type || memory_of(impl) != streams[k].address) return false;
  }
  for (std::int32_t k = num_elementwise; k < num_streams; ++k) {
    if (memory_of(streams[k].impl) != streams[k].address) return false;
  }
  return true;
}

/// Index among all ways to split parameters that were ever planned: the same in all processes.
std::int32_t StepEngine::sharding_of(const FusedSlot& slot) {
  if (slot.shard_groups.empty()) return BucketKey::kWhole;
  const auto found = std::find(shardings_.begin(), shardings_.end(), slot.shard_groups);
  const auto index = static_cast<std::int32_t>(found - shardings_.begin());
  if (found == shardings_.end()) shardings_.push_back(slot.shard_groups);
  return index;
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
  if (dtype == grad.scalar_type() && !grad.is_neg() && same_layout(grad, param)) return grad;
  // Another layout, or fp64 on one side: a copy in the parameter's layout stands in for this step.
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

const at::Tensor& StepEngine::grad_of(std::size_t index, const at::TensorList* grads) const {
  return grads != nullptr ? (*grads)[index] : slots_[index].param.mutable_grad();
}

/// Long lists of small tensors are bound by the latency of their tensor objects, which lie
/// scattered: ask for those of later slots while this one is looked at.
void StepEngine::fetch_ahead(std::size_t index) const {
  constexpr std::size_t kObjects = 16;
  constexpr std::size_t kStorages = 8;
  constexpr std::size_t kGrads = 4;
  const auto fetch = [](const void* object, int bytes) {
    for (int line = 0; line < bytes; line += 64) {
      __builtin_prefetch(static_cast<const char*>(object) + line);
    }
  };
  if (index + kObjects >= planned_.size()) return;
  const Planned& objects = planned_[index + kObjects];
  for (std::int32_t k = 0; k < objects.num_streams; ++k) {
    fetch(objects.streams[k].impl, sizeof(c10::TensorImpl));
  }
  const Planned& storages = planned_[index + kStorages];
  for (std::int32_t k = 0; k < storages.num_streams; ++k) {
    fetch(storages.streams[k].impl->unsafe_storage().unsafeGetStorageImpl(), 128);
  }
  fetch(slots_[index + kGrads].param.mutable_grad().unsafeGetTensorImpl(), sizeof(c10::TensorImpl));
}

/// Looks at every slot, on all threads, without changing or throwing anything: does it take part,
/// and is it as planned? The few that are not are checked in full afterwards, in order.
void StepEngine::survey(const at::TensorList* grads) {
  found_.resize(slots_.size());
  const auto look = [&](std::size_t i) {
    const at::Tensor& grad = grad_of(i, grads);
    if (!grad.defined()) return Found::kNoGrad;
    const Planned& planned = planned_[i];
    const c10::TensorImpl* impl = grad.unsafeGetTensorImpl();
    const bool as_planned =
        impl->layout() == at::kStrided && impl->dtype() == planned.streams[0].type &&
        impl->device() == planned.key.device && impl->is_contiguous() && !grad.is_neg() &&
        impl->sizes().equals(planned.streams[0].impl->sizes()) && impl->has_storage() &&
        planned.unchanged();
    return as_planned ? Found::kAsPlanned : Found::kNeedsCheck;
  };
  at::parallel_for(0, static_cast<std::int64_t>(slots_.size()), kSlotsPerThread,
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t i = begin; i < end; ++i) {
                       if (grads == nullptr) fetch_ahead(static_cast<std::size_t>(i));
                       found_[i] = look(static_cast<std::size_t>(i));
                     }
                   });
}

void StepEngine::add_row(std::size_t index, const at::Tensor& grad) {
  Planned& planned = planned_[index];
  const bool as_planned = found_[index] == Found::kAsPlanned;
  at::Tensor held;
  if (!as_planned) {
    if (!planned.unchanged()) planned = check_slot(index, slots_[index]);
    held = usable_grad(index, planned, grad);
  }
  check_used_states(index);
  const at::Tensor& usable = as_planned ? grad : held;
  const Argument argument{algorithm_->op(), "grads", static_cast<std::int64_t>(index)};
  kernels::TensorRow row = planned.row;
  row.grad = memory_of(usable);
  if (row.numel != 0 && row.grad == nullptr) check_tensor(argument, grad);
  DeviceWork& work = work_on(planned.key.device);
  work.steps.push_back(row.step);
  active_.push_back(index);
  const std::int32_t sharding = planned.key.sharding;
  if (sharding != BucketKey::kWhole) {
    const auto place = std::lower_bound(work.shardings.begin(), work.shardings.end(), sharding);
    if (place == work.shardings.end() || *place != sharding) work.shardings.insert(place, sharding);
  } else if (row.numel == 0) {
    return;
  }
  BucketKey key = planned.key;
  key.grad = as_planned ? key.param : dtype_of(argument, usable);
  buckets_.of(key).add(row);
}

void StepEngine::gather(const std::vector<std::vector<HyperParam>>& groups,
                        const at::TensorList* grads) {
  buckets_.clear();
  converted_.clear();
  active_.clear();
  for (DeviceWork& work : work_) {
    work.steps.clear();
    work.buckets.clear();
    work.shardings.assign(1, BucketKey::kWhole);
  }
  set_groups(groups, planned_.front().key.device);
  survey(grads);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (found_[i] == Found::kNoGrad) continue;
    TORCH_CHECK(slots_[i].group >= 0 && slots_[i].group < static_cast<std::int64_t>(groups.size()),
                algorithm_->op(), ": expected params[", i, "] to belong to one of ", groups.size(),
                " parameter groups, got group ", slots_[i].group, ".");
    add_row(i, grad_of(i, grads));
  }
  for (Bucket& bucket : buckets_.all()) {
    if (bucket.rows.empty()) continue;
    const std::int32_t sharding = bucket.key.sharding;
    bucket.shard_groups = sharding == BucketKey::kWhole ? nullptr : &shardings_[sharding];
    work_on(bucket.key.device).buckets.push_back(&bucket);
  }
  for (DeviceWork& work : work_) {
    std::stable_sort(
        work.buckets.begin(), work.buckets.end(),
        [](const Bucket* a, const Bucket* b) { return a->key.sharding < b->key.sharding; });
  }
}

}  // namespace torchfuse::ops
