// SPDX-License-Identifier: BSD-3-Clause
// First half of a step: compare every tensor with the plan and fill the buckets. Nothing is written
// yet.
#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "ops/check.h"
#include "ops/step_engine.h"

namespace torchfuse::ops {

namespace {

void* memory_of(c10::TensorImpl* impl) {
  return impl == nullptr || impl->numel() == 0 ? nullptr : impl->mutable_data();
}

bool is_negated(const c10::TensorImpl& impl) {
  return impl.key_set().has(c10::DispatchKey::Negative);
}

/// Whether elements can be read and written where the tensor says that they lie: `numel` of them
/// without gaps.
bool has_memory(c10::TensorImpl& impl, std::int64_t numel) {
  if (impl.layout() != at::kStrided || !impl.has_storage() || is_negated(impl)) return false;
  if (numel == 0) return true;
  const auto end = static_cast<std::size_t>(impl.storage_offset() + numel) * impl.itemsize();
  return end <= impl.unsafe_storage().nbytes() && impl.unsafe_storage().data() != nullptr;
}

}  // namespace

/// One of the streams that have an element for each of the parameter's.
bool PlannedSlot::like_param(c10::TensorImpl* tensor, const caffe2::TypeMeta& type) const {
  if (tensor == nullptr) return type == caffe2::TypeMeta();
  return tensor->dtype() == type && tensor->device() == key.device && layout.matches(*tensor) &&
         has_memory(*tensor, row.numel);
}

bool PlannedSlot::is_number(c10::TensorImpl* tensor, const caffe2::TypeMeta& type) const {
  return tensor != nullptr && tensor->dtype() == type && tensor->device() == key.device &&
         tensor->numel() == 1 && has_memory(*tensor, 1);
}

bool PlannedSlot::accept(const SlotTensors& tensors, std::size_t num_states,
                         std::size_t num_elementwise) {
  if (!like_param(tensors.param, param) || !like_param(tensors.master, master)) return false;
  if (!is_number(tensors.step, caffe2::TypeMeta::Make<float>())) return false;
  for (std::size_t k = 0; k < num_elementwise; ++k) {
    if (!like_param(tensors.states[k], states[k])) return false;
  }
  for (std::size_t k = num_elementwise; k < num_states; ++k) {
    if (!is_number(tensors.states[k], states[k])) return false;
  }
  row.param = memory_of(tensors.param);
  row.master = memory_of(tensors.master);
  row.step = static_cast<float*>(memory_of(tensors.step));
  for (std::size_t k = 0; k < num_elementwise; ++k) row.state[k] = memory_of(tensors.states[k]);
  if (num_elementwise < num_states) row.tensor_state = memory_of(tensors.states[num_states - 1]);
  return true;
}

Argument StepEngine::grad_argument(std::size_t index) const {
  if (caller_.empty()) return {caller(), "grads", static_cast<std::int64_t>(index)};
  return {caller(), "grad", positions_[index], planned_[index].row.group};
}

/// The gradient, or a copy that stands in for it in this step: another layout, or fp64 on one side.
at::Tensor StepEngine::usable_grad(std::size_t index, bool write_back) {
  const PlannedSlot& planned = planned_[index];
  const Argument grad_argument = this->grad_argument(index);
  const at::Tensor grad = as_tensor((*slots_)[index].grad);
  const at::Tensor param = as_tensor((*slots_)[index].param);
  check_tensor(grad_argument, grad);
  check_same_device(grad_argument, grad, planned.key.device, "params");
  check_same_sizes(grad_argument, grad, param, "params");
  if (write_back && overlaps_itself(grad)) {
    fail(grad_argument, "have memory of its own for every element with write_back_grads",
         "strides " + c10::str(grad.strides()) + " for sizes " + c10::str(grad.sizes()),
         "Set the gradient to grad.contiguous(), or write_back_grads to False.");
  }

  const bool wide = planned.key.param == kernels::DType::kFloat64;
  at::ScalarType dtype = grad.scalar_type();
  if (wide || dtype == at::kDouble) dtype = wide ? at::kDouble : at::kFloat;
  if (dtype == grad.scalar_type() && !grad.is_neg() && same_layout(grad, param)) return grad;
  at::Tensor copy = at::empty_like(param, param.options().dtype(dtype).requires_grad(false));
  copy.copy_(grad);
  converted_.emplace_back(grad, copy);
  return copy;
}

void StepEngine::check_used_states(std::size_t index) const {
  const PlannedSlot& planned = planned_[index];
  const std::vector<std::string>& names = algorithm_->state_names();
  for (std::size_t k = 0; k < names.size(); ++k) {
    if (planned.states[k] != caffe2::TypeMeta()) continue;
    if (!algorithm_->uses_state(planned.row.group, static_cast<int>(k))) continue;
    const std::string list = names[k] + "s";
    FusedSlot place;
    place.position = positions_[index];
    place.group = planned.row.group;
    fail(argument(list.c_str(), names[k].c_str(), index, place),
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

/// Long lists of small tensors are bound by the latency of their tensor objects, which lie
/// scattered: ask for those of later slots while this one is looked at.
void StepEngine::fetch_ahead(std::size_t index) const {
  constexpr std::size_t kObjects = 16;
  constexpr std::size_t kStorages = 8;
  const auto fetch = [](const void* object, int bytes) {
    for (int line = 0; line < bytes; line += 64) {
      __builtin_prefetch(static_cast<const char*>(object) + line);
    }
  };
  const auto for_each = [&](const SlotTensors& tensors, const auto& visit) {
    for (c10::TensorImpl* tensor : {tensors.param, tensors.grad, tensors.master, tensors.step}) {
      if (tensor != nullptr) visit(tensor);
    }
    for (c10::TensorImpl* tensor : tensors.states) {
      if (tensor != nullptr) visit(tensor);
    }
  };
  if (index + kObjects >= slots_->size()) return;
  for_each((*slots_)[index + kObjects],
           [&](c10::TensorImpl* tensor) { fetch(tensor, sizeof(c10::TensorImpl)); });
  for_each((*slots_)[index + kStorages], [&](c10::TensorImpl* tensor) {
    if (tensor->has_storage()) fetch(tensor->unsafe_storage().unsafeGetStorageImpl(), 128);
  });
}

StepEngine::Found StepEngine::look(std::size_t index) {
  const SlotTensors& tensors = (*slots_)[index];
  PlannedSlot& planned = planned_[index];
  if (tensors.grad == nullptr) return Found::kNoGrad;
  const std::size_t num_states = algorithm_->state_names().size();
  const std::size_t num_elementwise = num_states - algorithm_->num_tensor_states();
  if (!planned.accept(tensors, num_states, num_elementwise)) return Found::kNotAsPlanned;
  c10::TensorImpl& grad = *tensors.grad;
  const bool as_planned = planned.layout.contiguous && grad.dtype() == planned.param &&
                          grad.device() == planned.key.device && grad.layout() == at::kStrided &&
                          planned.layout.matches(grad) && has_memory(grad, planned.row.numel);
  return as_planned ? Found::kAsPlanned : Found::kOtherGrad;
}

/// Looks at every slot, on all threads, without throwing anything: does it take part, and is it as
/// planned? The few that are not are looked at again afterwards, in order.
void StepEngine::survey() {
  found_.resize(planned_.size());
  at::parallel_for(0, static_cast<std::int64_t>(planned_.size()), kSlotsPerThread,
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t i = begin; i < end; ++i) {
                       fetch_ahead(static_cast<std::size_t>(i));
                       found_[i] = look(static_cast<std::size_t>(i));
                     }
                   });
}

void StepEngine::add_row(std::size_t index, bool write_back) {
  const PlannedSlot& planned = planned_[index];
  kernels::TensorRow row = planned.row;
  BucketKey key = planned.key;
  key.grad = key.param;
  check_used_states(index);
  if (found_[index] == Found::kAsPlanned) {
    row.grad = memory_of((*slots_)[index].grad);
  } else {
    const at::Tensor grad = usable_grad(index, write_back);
    row.grad = memory_of(grad.unsafeGetTensorImpl());
    key.grad = dtype_of(grad_argument(index), grad);
  }
  DeviceWork& work = work_on(key.device);
  work.steps.push_back(row.step);
  active_.push_back(index);
  if (key.sharding != BucketKey::kWhole) {
    const auto place = std::lower_bound(work.shardings.begin(), work.shardings.end(), key.sharding);
    if (place == work.shardings.end() || *place != key.sharding) {
      work.shardings.insert(place, key.sharding);
    }
  } else if (row.numel == 0) {
    return;
  }
  buckets_.of(key).add(row);
}

/// False if a tensor is not as planned.
bool StepEngine::gather(const std::vector<std::vector<HyperParam>>& groups, bool write_back) {
  buckets_.clear();
  active_.clear();
  for (DeviceWork& work : work_) {
    work.steps.clear();
    work.buckets.clear();
    work.shardings.assign(1, BucketKey::kWhole);
  }
  survey();
  if (std::find(found_.begin(), found_.end(), Found::kNotAsPlanned) != found_.end()) return false;
  set_groups(groups, planned_.front().key.device);
  for (std::size_t i = 0; i < planned_.size(); ++i) {
    if (found_[i] == Found::kNoGrad) continue;
    const std::int64_t group = planned_[i].row.group;
    TORCH_CHECK(group >= 0 && group < static_cast<std::int64_t>(groups.size()), caller(),
                ": expected params[", i, "] to belong to one of ", groups.size(),
                " parameter groups, got group ", group, ".");
    add_row(i, write_back);
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
  return true;
}

}  // namespace torchfuse::ops
