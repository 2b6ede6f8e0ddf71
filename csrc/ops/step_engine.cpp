// SPDX-License-Identifier: BSD-3-Clause
// Second half of a step: statistics, prologue and update, on each device that holds parameters.
#include "ops/step_engine.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "ops/check.h"
#include "ops/sharding.h"

namespace torchfuse::ops {

namespace {

constexpr std::int64_t kPartialDoubles = sizeof(kernels::NormPartial) / sizeof(double);
constexpr std::int64_t kScalarsFloats = sizeof(kernels::StepScalars) / sizeof(float);
constexpr std::int64_t kTotalNormIndex = offsetof(kernels::StepScalars, total_norm) / sizeof(float);
constexpr std::int64_t kSkipIndex = offsetof(kernels::StepScalars, skip) / sizeof(float);

/// The update begins where this ends, with gradients that the caches still hold.
void norm_from_the_end(kernels::CpuIsa isa, const kernels::L2NormArgs& args, std::int64_t begin,
                       std::int64_t end) {
  constexpr std::int64_t kElements = 1 << 18;
  while (end > begin) {
    const std::int64_t first = std::max(begin, end - kElements);
    kernels::multi_tensor_l2_norm_cpu(isa, args, first, end);
    end = first;
  }
}

}  // namespace

StepEngine::StepEngine(std::unique_ptr<Algorithm> algorithm) : algorithm_(std::move(algorithm)) {}

kernels::StepScalars* StepEngine::DeviceWork::scalars_ptr() const {
  return static_cast<kernels::StepScalars*>(scalars.mutable_data_ptr());
}

kernels::NormPartial* StepEngine::DeviceWork::partials_ptr() const {
  return static_cast<kernels::NormPartial*>(partials.mutable_data_ptr());
}

void StepEngine::check_options(const FusedStepOptions& options) const {
  const char* op = algorithm_->op();
  if (options.grad_scale) check_scalar({op, "grad_scale"}, *options.grad_scale, at::kFloat);
  if (options.found_inf) check_scalar({op, "found_inf"}, *options.found_inf, at::kFloat);
  TORCH_CHECK(options.seed >= 0, op, ": expected seed to be at least 0, got ", options.seed, ".");
  if (options.max_grad_norm) {
    TORCH_CHECK(*options.max_grad_norm >= 0.0, op,
                ": expected max_grad_norm to be a number of at least 0 or None, got ",
                *options.max_grad_norm, ".");
  }
}

void StepEngine::prepare_scalars(const FusedStepOptions& options) {
  for (DeviceWork& work : work_) {
    if (work.steps.empty()) continue;
    const auto on_device = at::TensorOptions().device(work.device);
    if (!work.scalars.defined()) {
      work.scalars = at::empty({kScalarsFloats}, on_device.dtype(at::kFloat));
      work.arrivals = at::zeros({1}, on_device.dtype(at::kInt));
    }
    work.grad_scale = options.grad_scale ? options.grad_scale->to(work.device) : at::Tensor();
    work.found_inf = options.found_inf ? options.found_inf->to(work.device) : at::Tensor();
    work.num_partials = 0;
    work.prologue_done = false;
    for (const Bucket* bucket : work.buckets) work.num_partials += bucket->num_partials();
    const std::int64_t doubles = std::max<std::int64_t>(1, work.num_partials) * kPartialDoubles;
    if (!work.partials.defined() || work.partials.numel() < doubles) {
      work.partials = at::empty({doubles}, on_device.dtype(at::kDouble));
    }
  }
}

kernels::PrologueArgs StepEngine::prologue_args(const DeviceWork& work,
                                                const FusedStepOptions& options,
                                                bool has_norm) const {
  kernels::PrologueArgs args;
  if (work.grad_scale.defined()) {
    args.params.grad_scale = work.grad_scale.const_data_ptr<float>();
  }
  if (work.found_inf.defined()) {
    args.params.found_inf = work.found_inf.mutable_data_ptr<float>();
  }
  args.params.check = options.check_inside;
  args.params.has_norm = has_norm;
  args.params.max_grad_norm = options.max_grad_norm.value_or(-1.0);
  args.partials = work.partials_ptr();
  args.num_partials = has_norm ? work.num_partials : 0;
  args.scalars = work.scalars_ptr();
  args.steps = work.steps.data();
  args.num_steps = static_cast<std::int64_t>(work.steps.size());
  return args;
}

void StepEngine::reduce_norms(const FusedStepOptions& options) {
  std::int64_t sources = 0;  // sums that the global norm adds up
  for (const DeviceWork& work : work_) {
    if (!work.steps.empty()) sources += static_cast<std::int64_t>(work.shardings.size());
  }
  for (DeviceWork& work : work_) {
    const c10::OptionalDeviceGuard guard(work.device);
    kernels::NormPartial* partials = work.steps.empty() ? nullptr : work.partials_ptr();
    for (const Bucket* bucket : work.buckets) {
      const kernels::L2NormArgs args{bucket->table(), bucket->slots.data(), partials};
      partials += bucket->num_partials();
      if (work.device.is_cpu()) {
        parallel_over_elements(args.tensors.total(),
                               [&](kernels::CpuIsa isa, std::int64_t begin, std::int64_t end) {
                                 norm_from_the_end(isa, args, begin, end);
                               });
        continue;
      }
#if defined(TORCHFUSE_WITH_CUDA)
      const kernels::PrologueArgs prologue = prologue_args(work, options, true);
      const bool only_source = sources == 1 && work.buckets.size() == 1;
      check_status(algorithm_->op(),
                   kernels::multi_tensor_l2_norm_cuda(
                       args, only_source ? &prologue : nullptr,
                       static_cast<std::uint32_t*>(work.arrivals.mutable_data_ptr()),
                       &work.prologue_done, current_stream(work.device)));
#else
      (void)options;
#endif
    }
  }
  if (sources > 1) share_partials();
}

at::Tensor StepEngine::sum_partials(const DeviceWork& work, const kernels::NormPartial* partials,
                                    std::int64_t count) const {
  at::Tensor sum = at::empty({kPartialDoubles}, work.partials.options());
  auto* out = static_cast<kernels::NormPartial*>(sum.mutable_data_ptr());
  if (work.device.is_cpu()) kernels::reduce_partials_cpu(partials, count, out);
#if defined(TORCHFUSE_WITH_CUDA)
  if (work.device.is_cuda()) {
    check_status(algorithm_->op(),
                 kernels::reduce_partials_cuda(partials, count, out, current_stream(work.device)));
  }
#endif
  return sum;
}

/// Several devices, or parameters that are split over processes: each device's partials are reduced
/// to one per sharding, these are summed over the processes, and all devices get a copy of all.
/// Splits without an element here take part too: see Note [Sharded parameters].
void StepEngine::share_partials() {
  std::vector<at::Tensor> sums;
  for (const DeviceWork& work : work_) {
    if (work.steps.empty()) continue;
    const c10::OptionalDeviceGuard guard(work.device);
    const kernels::NormPartial* partials = work.partials_ptr();
    auto bucket = work.buckets.begin();
    for (const std::int32_t sharding : work.shardings) {
      std::int64_t count = 0;
      for (; bucket != work.buckets.end() && (*bucket)->key.sharding == sharding; ++bucket) {
        count += (*bucket)->num_partials();
      }
      sums.push_back(sum_partials(work, partials, count));
      if (sharding != BucketKey::kWhole) sum_over_shards(sums.back(), shardings_[sharding]);
      partials += count;
    }
  }
  for (DeviceWork& work : work_) {
    if (work.steps.empty()) continue;
    std::vector<at::Tensor> local;
    for (const at::Tensor& sum : sums) local.push_back(sum.to(work.device));
    work.partials = at::cat(local);
    work.num_partials = static_cast<std::int64_t>(local.size());
  }
}

void StepEngine::run_prologues(const FusedStepOptions& options, bool has_norm) {
  for (DeviceWork& work : work_) {
    if (work.steps.empty() || work.prologue_done) continue;
    const kernels::PrologueArgs args = prologue_args(work, options, has_norm);
    if (work.device.is_cpu()) {
      kernels::prologue_cpu(args);
      continue;
    }
#if defined(TORCHFUSE_WITH_CUDA)
    const c10::OptionalDeviceGuard guard(work.device);
    check_status(algorithm_->op(), kernels::prologue_cuda(args, current_stream(work.device)));
#endif
  }
  if (!options.found_inf || !options.check_inside) return;
  for (const DeviceWork& work : work_) {
    if (work.steps.empty() || work.found_inf.is_same(*options.found_inf)) continue;
    // The flag lives on another device: raise it there if this device's copy was raised.
    const at::Tensor flag = work.found_inf.to(options.found_inf->device());
    options.found_inf->copy_(at::maximum(*options.found_inf, flag.view_as(*options.found_inf)));
  }
}

void StepEngine::set_groups(const std::vector<std::vector<HyperParam>>& groups,
                            const c10::Device& device) {
  algorithm_->set_groups(groups, device);
  groups_device_ = device;
}

void StepEngine::update(const std::vector<std::vector<HyperParam>>& groups,
                        const FusedStepOptions& options) {
  for (DeviceWork& work : work_) {
    if (work.buckets.empty()) continue;
    const c10::OptionalDeviceGuard guard(work.device);
    if (work.device != groups_device_) set_groups(groups, work.device);
    for (Bucket* bucket : work.buckets) {
      bucket->seed = static_cast<std::uint64_t>(options.seed);
      algorithm_->update(*bucket, work.scalars_ptr(), options.write_back_grads);
    }
  }
}

void StepEngine::finish(const FusedStepOptions& options) {
  if (options.write_back_grads) {
    for (auto& [original, copy] : converted_) original.copy_(copy);
  }
  converted_.clear();
  at::parallel_for(0, static_cast<std::int64_t>(active_.size()), kSlotsPerThread,
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t i = begin; i < end; ++i) {
                       const FusedSlot& slot = slots_[active_[i]];
                       mark_written(slot.param);
                       if (options.write_back_grads) mark_written(slot.param.mutable_grad());
                     }
                   });
  active_.clear();
}

void StepEngine::run(const std::vector<std::vector<HyperParam>>& groups,
                     const FusedStepOptions& options, const at::TensorList* grads) {
  const c10::NoGradGuard no_grad;
  check_options(options);
  if (slots_.empty()) return;
  gather(groups, grads);
  if (active_.empty()) return;
  prepare_scalars(options);
  const bool has_norm = options.check_inside || options.max_grad_norm.has_value();
  if (has_norm) reduce_norms(options);
  run_prologues(options, has_norm);
  update(groups, options);
  finish(options);
}

at::Tensor StepEngine::total_norm() const {
  for (const DeviceWork& work : work_) {
    if (work.scalars.defined()) return work.scalars.select(0, kTotalNormIndex).clone();
  }
  return {};
}

at::Tensor StepEngine::skipped() const {
  for (const DeviceWork& work : work_) {
    if (work.scalars.defined()) return work.scalars.select(0, kSkipIndex).clone();
  }
  return {};
}

}  // namespace torchfuse::ops
