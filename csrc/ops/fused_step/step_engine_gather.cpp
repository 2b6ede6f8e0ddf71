// SPDX-License-Identifier: BSD-3-Clause
// First half of a step: compares every tensor with the plan and fills the buckets. Nothing is
// written yet.
#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <bit>

#include "ops/check.h"
#include "ops/fused_step/step_engine.h"

namespace torchfuse::ops {

namespace {

void* memory_of(c10::TensorImpl* impl) {
  return impl == nullptr || impl->numel() == 0 ? nullptr : impl->mutable_data();
}

}  // namespace

[[gnu::always_inline]] inline bool Layout::matches(const c10::TensorImpl& tensor) const {
  const c10::IntArrayRef own = tensor.sizes();
  if (own.size() != sizes.size()) return false;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (own[d] != sizes[d]) return false;
  }
  if (contiguous) return tensor.is_contiguous();
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1 && tensor.strides()[d] != strides[d]) return tensor.numel() == 0;
  }
  return true;
}

[[gnu::always_inline]] inline bool PlannedTensor::find_memory(c10::TensorImpl& tensor,
                                                              std::int64_t numel,
                                                              void*& address) const {
  const c10::StorageImpl* storage = tensor.unsafe_storage().unsafeGetStorageImpl();
  if (storage == nullptr) return false;
  address = nullptr;
  if (numel == 0) return true;
  const std::int64_t offset = tensor.storage_offset();
  if (static_cast<std::size_t>((offset + numel) * itemsize) > storage->nbytes()) return false;
  char* const memory = static_cast<char*>(tensor.unsafe_storage().mutable_data());
  if (memory == nullptr) return false;
  address = memory + offset * itemsize;
  return true;
}

/// Stores the address of an operand, which has one element per parameter element. Sets `moved` if
/// the address has changed.
[[gnu::always_inline]] inline bool PlannedSlot::take_operand(const PlannedTensor& like,
                                                             c10::TensorImpl* tensor,
                                                             void*& address, bool& moved) const {
  if (tensor == nullptr) return !like.exists;
  void* found = nullptr;
  const bool taken = like.exists && like.matches(*tensor) && layout.matches(*tensor) &&
                     like.find_memory(*tensor, row.numel, found);
  moved |= found != address;
  address = found;
  return taken;
}

[[gnu::always_inline]] inline bool PlannedSlot::take_number(const PlannedTensor& like,
                                                            c10::TensorImpl* tensor,
                                                            void*& address) {
  return tensor != nullptr && like.exists && like.matches(*tensor) && tensor->numel() == 1 &&
         like.find_memory(*tensor, 1, address);
}

inline bool PlannedSlot::accept(const SlotTensors& tensors, std::size_t num_states,
                                std::size_t num_elementwise) {
  bool moved = false;
  bool taken = take_operand(param, tensors.param, row.param, moved) &&
               take_operand(master, tensors.master, row.master, moved) &&
               take_operand(ema, tensors.ema, row.ema, moved);
  for (std::size_t k = 0; taken && k < num_elementwise; ++k) {
    taken = take_operand(states[k], tensors.states[k], row.state[k], moved);
  }
  if (taken && num_elementwise < num_states) {
    const std::size_t last = num_states - 1;
    const void* const before = row.tensor_state;
    taken = take_number(states[last], tensors.states[last], row.tensor_state);
    moved |= row.tensor_state != before;
  }
  if (moved) unchecked = true;
  if (!taken) return false;
  void* count = nullptr;
  if (!take_number(step, tensors.step, count)) return false;
  row.step = static_cast<float*>(count);
  if (tensors.start == nullptr) return !start.exists;
  void* begin = nullptr;
  if (!take_number(start, tensors.start, begin)) return false;
  row.start = static_cast<const float*>(begin);
  return true;
}

/// Returns the gradient. If the layout differs, or only one of gradient and parameter is fp64,
/// returns a converted copy for this step.
at::Tensor StepEngine::usable_grad(std::size_t index, bool write_back) {
  const PlannedSlot& planned = planned_[index];
  const Argument grad_argument = argument("grads", "grad", index);
  const at::Tensor grad = as_tensor((*slots_)[index].grad);
  const at::Tensor param = as_tensor((*slots_)[index].param);
  check_tensor(grad_argument, grad);
  check_same_device(grad_argument, grad, planned.key.device, "params");
  check_same_sizes(grad_argument, grad, param, "params");
  if (write_back && overlaps_itself(grad)) {
    fail(grad_argument, "have separate memory for every element with write_back_grads",
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
  const std::uint32_t missing = used_states_[planned.row.group] & ~planned.has_states;
  if (missing == 0) return;
  const std::string& name = algorithm_->state_names()[std::countr_zero(missing)];
  const std::string list = name + "s";
  fail(argument(list.c_str(), name.c_str(), index), "be a tensor under these hyper-parameters",
       "none");
}

void StepEngine::check_used_ema(std::size_t index) const {
  if (planned_[index].ema.exists) return;
  fail(argument("ema_params", "ema_param", index), "be a tensor in a step with averages", "none");
}

StepEngine::DeviceWork& StepEngine::work_on(const c10::Device& device) {
  for (DeviceWork& work : work_) {
    if (work.device == device) return work;
  }
  work_.emplace_back();
  work_.back().device = device;
  return work_.back();
}

/// Long lists of small tensors are bound by the latency of the tensor objects, which are scattered
/// in memory. Prefetches later slots' objects while this slot is compared.
void StepEngine::fetch_ahead(std::size_t index) const {
  constexpr std::size_t kObjects = 16;
  constexpr std::size_t kStorages = 8;
  const auto fetch = [](const void* object, int bytes) {
    for (int line = 0; line < bytes; line += 64) {
      __builtin_prefetch(static_cast<const char*>(object) + line);
    }
  };
  const auto for_each = [&](const SlotTensors& tensors, const auto& visit) {
    for (c10::TensorImpl* tensor :
         {tensors.param, tensors.grad, tensors.master, tensors.ema, tensors.step}) {
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
    fetch(tensor->unsafe_storage().unsafeGetStorageImpl(), 128);
  });
}

StepEngine::Match StepEngine::match_slot(std::size_t index) {
  const SlotTensors& tensors = (*slots_)[index];
  PlannedSlot& planned = planned_[index];
  if (tensors.grad == nullptr) return Match::kNoGrad;
  if (!planned.accept(tensors, num_states_, num_elementwise_)) return Match::kNotAsPlanned;
  c10::TensorImpl& grad = *tensors.grad;
  const bool as_planned = planned.layout.contiguous && planned.param.matches(grad) &&
                          planned.layout.matches(grad) &&
                          planned.param.find_memory(grad, planned.row.numel, planned.row.grad);
  return as_planned ? Match::kAsPlanned : Match::kOtherGrad;
}

/// Compares every slot with the plan, on all threads, without throwing. The few slots that do not
/// match are compared again afterwards, in order.
void StepEngine::match_slots() {
  matches_.resize(planned_.size());
  apart_ = true;
  at::parallel_for(0, static_cast<std::int64_t>(planned_.size()), kSlotsPerThread,
                   [&](std::int64_t begin, std::int64_t end) {
                     bool apart = true;
                     for (std::int64_t i = begin; i < end; ++i) {
                       fetch_ahead(static_cast<std::size_t>(i));
                       matches_[i] = match_slot(static_cast<std::size_t>(i));
                       apart = apart && (matches_[i] == Match::kNoGrad || !planned_[i].unchecked);
                     }
                     if (!apart) std::atomic_ref(apart_).store(false, std::memory_order_relaxed);
                   });
}

StepEngine::Target StepEngine::target_of(const BucketKey& key) {
  DeviceWork& work = work_on(key.device);
  if (key.sharding != BucketKey::kWhole) {
    const auto place = std::lower_bound(work.shardings.begin(), work.shardings.end(), key.sharding);
    if (place == work.shardings.end() || *place != key.sharding) {
      work.shardings.insert(place, key.sharding);
    }
  }
  return {&work, &buckets_.of(key)};
}

/// `like` is the slot for which `target` was found, or null. Neighbors nearly always share a
/// target.
void StepEngine::add_row(std::size_t index, const FusedStepOptions& options,
                         const PlannedSlot*& like, Target& target) {
  PlannedSlot& planned = planned_[index];
  check_used_states(index);
  const bool checked = sized_ != nullptr && sized_->row.group == planned.row.group &&
                       sized_->whole_layout().sizes == planned.whole_layout().sizes;
  if (has_layouts_ && !checked) {
    algorithm_->check_sizes(argument("params", "", index), planned.row.group,
                            planned.whole_layout().sizes);
    sized_ = &planned;
  }
  if (options.ema.has_value()) check_used_ema(index);
  const bool as_planned = matches_[index] == Match::kAsPlanned;
  if (!as_planned || like == nullptr || like->first_alike != planned.first_alike) {
    BucketKey key = planned.key;
    key.grad = key.param;
    key.has_ema = options.ema.has_value();
    key.clip_apart = options.clips_apart() && options.clip_apart[planned.row.group];
    if (!as_planned) {
      const at::Tensor grad = usable_grad(index, options.writes_grads());
      planned.row.grad = memory_of(grad.unsafeGetTensorImpl());
      key.grad = dtype_of(argument("grads", "grad", index), grad);
    }
    target = target_of(key);
    like = as_planned ? &planned : nullptr;
  }
  target.work->steps.push_back(planned.row.step);
  active_.push_back(index);
  if (planned.row.numel != 0 || planned.key.sharding != BucketKey::kWhole) {
    target.bucket->add(planned.row);
    if (has_layouts_) {
      const Layout& whole = planned.whole_layout();
      const std::int64_t name = planned.whole == nullptr ? 0 : planned.whole->name_checksum;
      target.bucket->layouts.push_back({whole.sizes, whole.strides, planned.row.index, name});
    }
  }
}

/// Returns false if a tensor does not match the plan.
bool StepEngine::gather(const std::vector<std::vector<HyperParam>>& groups,
                        const FusedStepOptions& options) {
  buckets_.clear();
  active_.clear();
  sized_ = nullptr;
  for (DeviceWork& work : work_) {
    work.steps.clear();
    work.buckets.clear();
    work.shardings.assign(1, BucketKey::kWhole);
    work.takes_part = false;
  }
  if (planned_.empty()) return true;
  match_slots();
  const auto stale = std::find(matches_.begin(), matches_.end(), Match::kNotAsPlanned);
  if (stale != matches_.end()) return false;
  if (!apart_) check_overlaps();
  TORCH_CHECK(options.clip_apart.empty() || options.clip_apart.size() == groups.size(), caller(),
              ": expected clip_apart to have one entry per group, got ", options.clip_apart.size(),
              " for ", groups.size(), " groups.");
  set_groups(groups, planned_.front().key.device);
  used_states_.assign(groups.size(), 0);
  for (std::size_t group = 0; group < groups.size(); ++group) {
    for (std::size_t k = 0; k < num_states_; ++k) {
      const bool used =
          algorithm_->uses_state(static_cast<std::int64_t>(group), static_cast<int>(k));
      if (used) used_states_[group] |= 1u << k;
    }
  }
  const PlannedSlot* like = nullptr;
  Target target;
  for (std::size_t i = 0; i < planned_.size(); ++i) {
    if (matches_[i] == Match::kNoGrad) continue;
    const std::int64_t group = planned_[i].row.group;
    TORCH_CHECK(group >= 0 && group < static_cast<std::int64_t>(groups.size()), caller(),
                ": expected params[", i, "] to belong to one of ", groups.size(),
                " parameter groups, got group ", group, ".");
    add_row(i, options, like, target);
  }
  if (options.writes_grads()) check_written_grads();
  for (Bucket& bucket : buckets_.all()) {
    if (bucket.rows.empty()) continue;
    const std::int32_t sharding = bucket.key.sharding;
    const bool whole = sharding == BucketKey::kWhole;
    bucket.shard_groups = whole ? nullptr : &shardings_[sharding].groups;
    bucket.exchange_group = whole ? nullptr : &shardings_[sharding].exchange_group;
    std::vector<Bucket*>& sorted = work_on(bucket.key.device).buckets;
    const auto place =
        std::upper_bound(sorted.begin(), sorted.end(), &bucket,
                         [](const Bucket* a, const Bucket* b) { return a->key < b->key; });
    sorted.insert(place, &bucket);
  }
  for (DeviceWork& work : work_) {
    work.takes_part = !work.steps.empty();
    std::int64_t total = 0;
    for (const Bucket* bucket : work.buckets) total += bucket->offsets.back();
    for (Bucket* bucket : work.buckets) bucket->divide(total);
  }
  return true;
}

}  // namespace torchfuse::ops
