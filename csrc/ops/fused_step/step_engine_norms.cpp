// SPDX-License-Identifier: BSD-3-Clause
// The phases before the update: the norm of all gradients, over devices and processes, and the
// prologue.
#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <torchfuse/collectives.h>
#include <torchfuse/device_copy.h>

#include <algorithm>
#include <string>
#include <variant>
#include <vector>

#include "ops/fused_step/sharding.h"
#include "ops/fused_step/step_engine.h"

namespace torchfuse::ops {

namespace {

/// Reads the range from the end, because the update begins at the range's start, whose gradients
/// are then still in the caches.
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

kernels::PrologueArgs StepEngine::prologue_args(const DeviceWork& work,
                                                const FusedStepOptions& options,
                                                bool has_norm) const {
  kernels::PrologueArgs args;
  if (work.grad_scale.defined()) {
    args.params.grad_scale = work.grad_scale.const_data_ptr<float>();
  }
  if (work.found_inf.defined()) {
    args.params.found_inf = work.found_inf.mutable_data_ptr<float>();
    args.params.found_inf_is_output = options.found_inf_is_output;
  }
  args.params.check = options.check_inside;
  args.params.has_norm = has_norm;
  args.params.max_grad_norm = options.max_grad_norm.value_or(-1.0);
  if (options.skip_norm_above) {
    kernels::ScalarParam& threshold = args.params.skip_norm_above;
    if (const auto* number = std::get_if<double>(&*options.skip_norm_above)) {
      threshold.value = *number;
    } else {
      threshold.pointer = work.skip_norm_above.const_data_ptr();
      threshold.dtype = work.skip_norm_above.scalar_type() == at::kDouble
                            ? kernels::DType::kFloat64
                            : kernels::DType::kFloat32;
    }
  }
  if (has_norm) {
    args.partials = work.sums_ptr();
    args.num_partials = work.num_sums;
  }
  args.scalars = work.scalars_ptr(Norm::kAll);
  args.steps = work.steps.data();
  args.num_steps = static_cast<std::int64_t>(work.steps.size());
  return args;
}

/// Returns the arguments of another prologue, which adds the sums of one norm and copies the
/// decision to skip.
kernels::PrologueArgs StepEngine::clip_args(const DeviceWork& work, const FusedStepOptions& options,
                                            Norm norm) const {
  const std::int64_t others = work.num_sums - work.num_apart;
  const bool apart = norm == Norm::kApart;
  kernels::PrologueArgs args;
  if (work.grad_scale.defined()) {
    args.params.grad_scale = work.grad_scale.const_data_ptr<float>();
  }
  args.params.found_inf = &work.scalars_ptr(Norm::kAll)->skip;
  args.params.has_norm = true;
  args.params.max_grad_norm = *options.max_grad_norm;
  args.partials = work.sums_ptr() + (apart ? others : 0);
  args.num_partials = apart ? work.num_apart : others;
  args.scalars = work.scalars_ptr(norm);
  return args;
}

void StepEngine::reduce_norm(DeviceWork& work, const Bucket& bucket, kernels::NormPartial* sums,
                             [[maybe_unused]] const kernels::PrologueArgs* prologue) const {
  kernels::L2NormArgs args{bucket.table(), bucket.chunk_offsets.data(), sums, bucket.chunk};
  if (work.device.is_cpu()) {
    parallel_over_elements(args.tensors.total(),
                           [&](kernels::CpuIsa isa, std::int64_t begin, std::int64_t end) {
                             norm_from_the_end(isa, args, begin, end);
                           });
    return;
  }
#if defined(TORCHFUSE_WITH_CUDA)
  args.tensors.device = bucket.kept.for_norm();
  args.partials = work.partials_ptr();
  const kernels::Status status =
      kernels::multi_tensor_l2_norm_cuda(args, {sums, work.arrivals.data()}, prologue,
                                         &work.prologue_done, current_stream(work.device));
  if (!status.ok()) work.arrivals.forget();
  check_status(caller(), status);
#endif
}

void StepEngine::reduce_norms(const FusedStepOptions& options) {
  std::int64_t sources = 0;  // sums that the global norm adds up
  for (const DeviceWork& work : work_) {
    if (work.takes_part) sources += static_cast<std::int64_t>(work.shardings.size());
  }
  const bool shares = sources > 1 || !options.norm_groups.empty();
  for (DeviceWork& work : work_) {
    if (work.buckets.empty()) continue;
    const c10::OptionalDeviceGuard guard(work.device);
    const kernels::PrologueArgs prologue = prologue_args(work, options, true);
    kernels::NormPartial* sums = work.sums_ptr();
    for (const Bucket* bucket : work.buckets) {
      const bool last_source = !shares && bucket == work.buckets.back();
      reduce_norm(work, *bucket, sums, last_source ? &prologue : nullptr);
      sums += bucket->num_sums();
    }
  }
  if (shares) share_partials(options);
}

at::Tensor StepEngine::sum_partials(const c10::Device& device, const kernels::NormPartial* partials,
                                    std::int64_t count) const {
  const c10::OptionalDeviceGuard guard(device);
  at::Tensor sum =
      at::empty({kPartialDoubles}, at::TensorOptions().dtype(at::kDouble).device(device));
  auto* out = static_cast<kernels::NormPartial*>(sum.mutable_data_ptr());
  if (device.is_cpu()) kernels::reduce_partials_cpu(partials, count, out);
#if defined(TORCHFUSE_WITH_CUDA)
  if (device.is_cuda()) {
    check_status(caller(),
                 kernels::reduce_partials_cuda(partials, count, out, current_stream(device)));
  }
#endif
  return sum;
}

/// Reduces each device's sums of one norm to one per sharding, and sums those over the sharding's
/// processes. `apart` selects the norm of buckets with clip_apart.
/// Shardings without a local element take part too: see Note [Sharded parameters].
std::vector<at::Tensor> StepEngine::sums_of_shardings(bool apart) const {
  std::vector<at::Tensor> sums;
  for (const DeviceWork& work : work_) {
    if (!work.takes_part) continue;
    const std::int64_t others = work.num_sums - work.num_apart;
    const kernels::NormPartial* partials = work.sums_ptr() + (apart ? others : 0);
    for (const std::int32_t sharding : work.shardings) {
      std::int64_t count = 0;
      for (const Bucket* bucket : work.buckets) {
        const BucketKey& key = bucket->key;
        if (key.clip_apart == apart && key.sharding == sharding) count += bucket->num_sums();
      }
      sums.push_back(sum_partials(work.device, partials, count));
      if (sharding != BucketKey::kWhole) sum_over_shards(sums.back(), shardings_[sharding].groups);
      partials += count;
    }
  }
  return sums;
}

/// Used with several devices, or with gradients in other processes. Gives every device a copy of
/// all sums, or of the sums over all processes. Those of buckets with clip_apart come last.
void StepEngine::share_partials(const FusedStepOptions& options) {
  const auto all_on = [](const c10::Device& device, const std::vector<at::Tensor>& sums) {
    std::vector<at::Tensor> local;
    for (const at::Tensor& sum : sums) local.push_back(to_device(sum, device));
    return at::cat(local);
  };
  std::vector<at::Tensor> norms[2] = {sums_of_shardings(false), {}};
  if (options.clips_apart()) norms[1] = sums_of_shardings(true);
  if (!options.norm_groups.empty()) {
    // Both norms, because another process may clip apart what this process does not have.
    const at::Tensor both = at::zeros(
        {2, kPartialDoubles}, at::TensorOptions().dtype(at::kDouble).device(options.norm_device));
    for (std::size_t i = 0; i < 2 && !norms[i].empty(); ++i) {
      const at::Tensor local = all_on(options.norm_device, norms[i]);
      const auto* partials = static_cast<const kernels::NormPartial*>(local.const_data_ptr());
      const auto count = static_cast<std::int64_t>(norms[i].size());
      both[static_cast<std::int64_t>(i)].copy_(sum_partials(options.norm_device, partials, count));
    }
    sum_over_shards(both, options.norm_groups);
    norms[0] = {both[0]};
    norms[1] = {both[1]};
  }
  std::vector<at::Tensor> sums = norms[0];
  sums.insert(sums.end(), norms[1].begin(), norms[1].end());
  for (DeviceWork& work : work_) {
    if (!work.takes_part) continue;
    work.shared = all_on(work.device, sums);
    work.num_sums = static_cast<std::int64_t>(sums.size());
    work.num_apart = static_cast<std::int64_t>(norms[1].size());
  }
}

/// Reduces found_inf over the processes, because a flag from outside the step describes only this
/// process.
void StepEngine::agree_on_skip(const FusedStepOptions& options) const {
  if (options.norm_groups.empty() || !options.found_inf || options.found_inf_is_output) return;
  all_reduce_(*options.found_inf, "max", options.norm_groups,
              caller() + std::string(": found_inf"));
}

void StepEngine::run_prologue(const DeviceWork& work, const kernels::PrologueArgs& args) const {
  if (work.device.is_cpu()) return kernels::prologue_cpu(args);
#if defined(TORCHFUSE_WITH_CUDA)
  const c10::OptionalDeviceGuard guard(work.device);
  check_status(caller(), kernels::prologue_cuda(args, current_stream(work.device)));
#endif
}

void StepEngine::run_prologues(const FusedStepOptions& options, bool has_norm) {
  for (const DeviceWork& work : work_) {
    if (!work.takes_part) continue;
    if (!work.prologue_done) run_prologue(work, prologue_args(work, options, has_norm));
    if (!options.clips_apart()) continue;
    for (const Norm norm : {Norm::kOthers, Norm::kApart}) {
      run_prologue(work, clip_args(work, options, norm));
    }
  }
  if (!options.found_inf || !options.check_inside) return;
  for (const DeviceWork& work : work_) {
    if (!work.takes_part || work.found_inf.is_same(*options.found_inf)) continue;
    // found_inf is on another device: set the flag there if this device's copy was set.
    const at::Tensor flag = to_device(work.found_inf, options.found_inf->device());
    options.found_inf->copy_(at::maximum(*options.found_inf, flag.view_as(*options.found_inf)));
  }
}

}  // namespace torchfuse::ops
