// SPDX-License-Identifier: BSD-3-Clause
// Runs a step in order: tensors (step_engine_gather.cpp), norms and prologue
// (step_engine_norms.cpp), and then the update on each device that has parameters.
#include "ops/fused_step/step_engine.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torchfuse/device_copy.h>
#include <torchfuse/masters.h>

#include <algorithm>
#include <limits>

#include "ops/check.h"
#include "ops/multi_tensor/unscale_bucket.h"

namespace torchfuse::ops {

namespace {

constexpr std::int64_t kScalarsFloats = sizeof(kernels::StepScalars) / sizeof(float);
constexpr std::int64_t kTotalNormIndex = offsetof(kernels::StepScalars, total_norm) / sizeof(float);
constexpr std::int64_t kSkipIndex = offsetof(kernels::StepScalars, skip) / sizeof(float);

}  // namespace

kernels::StepScalars* StepEngine::DeviceWork::scalars_ptr(Norm norm) const {
  return static_cast<kernels::StepScalars*>(scalars.mutable_data_ptr()) + static_cast<int>(norm);
}

kernels::NormPartial* StepEngine::DeviceWork::sums_ptr() const {
  return reinterpret_cast<kernels::NormPartial*>(
      shared.defined() ? shared.mutable_data_ptr<double>() : workspace.data());
}

void StepEngine::check_options(const FusedStepOptions& options) const {
  const char* op = caller();
  if (options.grad_scale) check_scalar({op, "grad_scale"}, *options.grad_scale, at::kFloat);
  if (options.found_inf) check_scalar({op, "found_inf"}, *options.found_inf, at::kFloat);
  TORCH_CHECK(!options.found_inf_is_output || (options.found_inf && options.check_inside), op,
              ": expected found_inf and check_inside with found_inf_is_output, got no ",
              options.found_inf ? "check_inside" : "found_inf", ".");
  TORCH_CHECK(options.seed >= 0, op, ": expected seed to be at least 0, got ", options.seed, ".");
  if (options.ema) {
    TORCH_CHECK(options.ema->decay >= 0.0 && options.ema->decay < 1.0, op,
                ": expected ema_decay to be at least 0 and less than 1, got ", options.ema->decay,
                ".");
    TORCH_CHECK(options.ema->start_step >= 0, op,
                ": expected ema_start_step to be at least 0, got ", options.ema->start_step, ".");
  }
  if (options.max_grad_norm) {
    TORCH_CHECK(*options.max_grad_norm >= 0.0, op,
                ": expected max_grad_norm to be a number of at least 0 or None, got ",
                *options.max_grad_norm, ".");
  }
  if (options.skip_norm_above) {
    if (const auto* number = std::get_if<double>(&*options.skip_norm_above)) {
      TORCH_CHECK(*number >= 0.0, op,
                  ": expected skip_norm_above to be a number of at least 0 or None, got ", *number,
                  ".");
    } else {
      const auto& tensor = std::get<at::Tensor>(*options.skip_norm_above);
      const bool is_double = tensor.defined() && tensor.scalar_type() == at::kDouble;
      check_scalar({op, "skip_norm_above"}, tensor, is_double ? at::kDouble : at::kFloat);
    }
  }
}

/// Throws if a capture would silently fix a number for all replays, or would contain the first
/// step.
void StepEngine::check_capture(const std::vector<std::vector<HyperParam>>& groups) const {
  if (caller_.empty()) return;  // an op's caller passes every argument explicitly
  for (const DeviceWork& work : work_) {
    if (!work.takes_part || !is_capturing(work.device)) continue;
    TORCH_CHECK(work.scalars.defined(), caller(),
                ": the first step cannot be captured in a CUDA graph. Run at least one step before "
                "the capture.");
    const std::vector<HyperParamInfo>& infos = algorithm_->hyper_params();
    const auto is_lr = [](const HyperParamInfo& info) { return info.name == "lr"; };
    const auto lr = std::find_if(infos.begin(), infos.end(), is_lr) - infos.begin();
    for (std::size_t g = 0; !work.steps.empty() && g < groups.size(); ++g) {
      TORCH_CHECK(static_cast<std::size_t>(lr) == infos.size() ||
                      std::holds_alternative<at::Tensor>(groups[g][lr]),
                  caller(), ": expected lr of group ", g,
                  " to be a tensor in a CUDA graph's capture, got a number, which every replay "
                  "would use. Give the optimizer capturable=True or a tensor lr, or call "
                  "make_capturable().");
    }
  }
}

void StepEngine::DeviceWork::reserve_sums() {
  num_sums = num_apart = 0;
  std::int64_t num_partials = 0;  // besides the sums; reused by every bucket in turn
  for (const Bucket* bucket : buckets) {
    num_sums += bucket->num_sums();
    if (bucket->key.clip_apart) num_apart += bucket->num_sums();
    if (device.is_cuda()) num_partials = std::max(num_partials, bucket->num_partials());
  }
  if (device.is_cuda()) arrivals.reserve(kernels::num_norm_arrivals(num_partials), device);
  workspace.reserve(std::max<std::int64_t>(1, num_sums + num_partials) * kPartialDoubles, device);
}

/// Updates the kept tables. Releases the tables of buckets without rows in this step.
void StepEngine::keep_rows() {
  for (Bucket& bucket : buckets_.all()) {
    if (!bucket.key.device.is_cuda()) continue;
    const c10::OptionalDeviceGuard guard(bucket.key.device);
    bucket.keep_rows();
  }
}

void StepEngine::prepare_scalars(const FusedStepOptions& options) {
  for (DeviceWork& work : work_) {
    if (!work.takes_part) continue;
    const auto on_device = at::TensorOptions().device(work.device);
    if (!work.scalars.defined()) {
      work.scalars = at::empty({kNumScalars * kScalarsFloats}, on_device.dtype(at::kFloat));
    }
    work.grad_scale =
        options.grad_scale ? to_device(*options.grad_scale, work.device) : at::Tensor();
    work.found_inf = options.found_inf ? to_device(*options.found_inf, work.device) : at::Tensor();
    const auto* threshold =
        options.skip_norm_above ? std::get_if<at::Tensor>(&*options.skip_norm_above) : nullptr;
    work.skip_norm_above = threshold != nullptr ? to_device(*threshold, work.device) : at::Tensor();
    work.prologue_done = false;
    work.shared.reset();
    if (measured_) work.reserve_sums();
  }
}

/// Returns whether a prologue writes this flag, rather than a copy on another device.
bool StepEngine::writes_flag(const at::Tensor& found_inf) const {
  return std::any_of(work_.begin(), work_.end(), [&](const DeviceWork& work) {
    return work.takes_part && work.device == found_inf.device();
  });
}

void StepEngine::set_groups(const std::vector<std::vector<HyperParam>>& groups,
                            const c10::Device& device) {
  algorithm_->set_groups(caller(), groups, device);
  groups_device_ = device;
}

void StepEngine::plan_exchanges() {
  for (const DeviceWork& work : work_) {
    const c10::OptionalDeviceGuard guard(work.device);
    for (const Bucket* bucket : work.buckets) algorithm_->plan_exchanges(caller(), *bucket);
  }
}

void StepEngine::update(const std::vector<std::vector<HyperParam>>& groups,
                        const FusedStepOptions& options) {
  const bool unscales = options.write_back_grads == WriteBackGrads::kUnscaled;
  for (DeviceWork& work : work_) {
    if (work.buckets.empty()) continue;
    const c10::OptionalDeviceGuard guard(work.device);
    if (work.device != groups_device_) set_groups(groups, work.device);
    const auto count = work.buckets.size();
    for (std::size_t i = 0; i < count; ++i) {
      Bucket* const bucket = work.buckets[options.update_from_the_end ? count - 1 - i : i];
      bucket->seed = static_cast<std::uint64_t>(options.seed);
      if (options.ema) {
        bucket->ema = {options.ema->decay, static_cast<double>(options.ema->start_step),
                       options.ema->warmup};
      }
      const Norm apart = bucket->key.clip_apart ? Norm::kApart : Norm::kOthers;
      const Norm norm = options.clips_apart() ? apart : Norm::kAll;
      algorithm_->update(*bucket, work.scalars_ptr(norm), options.writes_grads() && !unscales,
                         options.update_from_the_end);
    }
    if (unscales) unscale(work);
  }
}

/// Divides the gradients by the loss scale, whether or not the step was skipped. Runs after the
/// update, because the division rounds 16-bit gradients and the update must use unrounded ones.
void StepEngine::unscale(const DeviceWork& work) {
  if (!work.grad_scale.defined()) return;
  const at::Tensor inverse_scale = work.grad_scale.reciprocal();
  const at::Tensor found_inf = at::empty_like(inverse_scale);
  for (const Bucket* bucket : work.buckets) {
    unscale_bucket(caller(), *bucket, work.device, found_inf, inverse_scale);
  }
}

/// Bumps every version before the first copy, which might fail. Parameters that view one buffer
/// share a version counter, so versions are recorded after all of them have been bumped.
void StepEngine::finish(const FusedStepOptions& options) {
  const auto mark = [&](std::size_t index) {
    const SlotTensors& tensors = (*slots_)[index];
    for (c10::TensorImpl* written :
         {tensors.param, tensors.wrapper, tensors.master, tensors.step}) {
      mark_written(written);
    }
    for (c10::TensorImpl* state : tensors.states) mark_written(state);
    if (options.ema) mark_written(tensors.ema);
    if (options.writes_grads()) mark_written(tensors.grad);
  };
  at::parallel_for(0, static_cast<std::int64_t>(active_.size()), kSlotsPerThread,
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t i = begin; i < end; ++i) mark(active_[i]);
                   });
  if (has_masters_) note_written();
  if (!options.writes_grads()) return;
  for (auto& [original, copy] : converted_) original.copy_(copy);
}

void StepEngine::note_written() {
  for (const std::size_t index : active_) {
    PlannedSlot& planned = planned_[index];
    const SlotTensors& tensors = (*slots_)[index];
    if (!planned.key.has_master || tensors.param->is_inference()) continue;
    if (planned.written.has_value() && planned.written->same_memory(tensors)) {
      planned.written->note_versions(tensors);
    } else {
      planned.written.emplace(tensors);
    }
  }
}

namespace {

std::uint32_t version_of(const c10::TensorImpl* tensor) {
  return tensor == nullptr ? 0 : tensor->version_counter().current_version();
}

}  // namespace

Written::Written(const SlotTensors& tensors)
    : param(tensors.param),
      storage(tensors.param->storage().getWeakStorageImpl()),
      address(tensors.param->data()) {
  note_versions(tensors);
}

void Written::note_versions(const SlotTensors& tensors) {
  version = version_of(tensors.param);
  wrapper_version = version_of(tensors.wrapper);
}

bool Written::same_memory(const SlotTensors& tensors) const {
  return param == tensors.param && address == tensors.param->data() &&
         storage._unsafe_get_target() == tensors.param->unsafe_storage().unsafeGetStorageImpl();
}

bool Written::holds(const SlotTensors& tensors) const {
  return same_memory(tensors) && version == version_of(tensors.param) &&
         wrapper_version == version_of(tensors.wrapper);
}

/// See Note [Masters follow their parameters].
void StepEngine::follow_params() {
  if (!has_masters_) return;
  for (const std::size_t index : active_) {
    const PlannedSlot& planned = planned_[index];
    if (!planned.key.has_master) continue;
    const SlotTensors& tensors = (*slots_)[index];
    const bool known = planned.written.has_value() && !tensors.param->is_inference();
    if (known && planned.written->holds(tensors)) continue;
    remake_master(as_tensor(tensors.param), as_tensor(tensors.master));
  }
}

bool StepEngine::run(const std::vector<SlotTensors>& slots,
                     const std::vector<std::vector<HyperParam>>& groups,
                     const FusedStepOptions& options) {
  const c10::NoGradGuard no_grad;
  // A dispatch mode such as FakeTensorMode would replace the memory of sums and directions.
  const c10::impl::ExcludeDispatchKeyGuard no_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  check_options(options);
  if (slots.size() != planned_.size()) return false;
  slots_ = &slots;
  // Release all gradients after a step, even if the step failed.
  const auto release = c10::make_scope_exit([this] {
    slots_ = nullptr;
    active_.clear();
    converted_.clear();
  });
  if (!gather(groups, options)) return false;
  const bool measures = options.check_inside || options.max_grad_norm.has_value() ||
                        options.skip_norm_above.has_value();
  // A process without gradients must learn of a skipped step too.
  const bool shares = !options.norm_groups.empty() && (measures || options.found_inf);
  if (shares) work_on(options.norm_device).takes_part = true;
  check_capture(groups);
  if (has_layouts_) plan_exchanges();
  ran_ = true;
  measured_ = measures;
  results_.reset();
  agree_on_skip(options);
  if (options.found_inf_is_output && !writes_flag(*options.found_inf)) options.found_inf->zero_();
  if (active_.empty() && !shares) return true;
  follow_params();
  keep_rows();
  prepare_scalars(options);
  if (measured_) reduce_norms(options);
  run_prologues(options, measured_);
  update(groups, options);
  finish(options);
  results_ = active_.empty() ? options.norm_device : planned_[active_.front()].key.device;
  return true;
}

at::Tensor StepEngine::scalar_of_last_step(std::int64_t index, double without_gradients) const {
  if (!ran_) return {};
  for (const DeviceWork& work : work_) {
    if (results_ == work.device) return work.scalars.select(0, index).clone();
  }
  const c10::Device device = planned_.empty() ? c10::kCPU : planned_.front().key.device;
  return at::full({}, without_gradients, at::TensorOptions().dtype(at::kFloat).device(device));
}

at::Tensor StepEngine::total_norm() const {
  const double none = measured_ ? 0.0 : std::numeric_limits<double>::quiet_NaN();
  return scalar_of_last_step(kTotalNormIndex, none);
}

at::Tensor StepEngine::skipped() const { return scalar_of_last_step(kSkipIndex, 0.0); }

}  // namespace torchfuse::ops
