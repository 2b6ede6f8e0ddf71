// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/multi_tensor_l2_norm.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>
#include <torchfuse/ops.h>

#include <algorithm>

#include "ops/backend.h"
#include "ops/launch/arrivals.h"
#include "ops/multi_tensor/tensor_list.h"
#include "ops/registration.h"

namespace torchfuse {

namespace {

constexpr const char* kL2Norm = "multi_tensor_l2_norm";

using NormAndFlag = std::tuple<at::Tensor, at::Tensor>;

/// Runs the step's prologue, whose scalars contain the norm and which sets the flag.
void run_prologue(const c10::Device& device, const kernels::PrologueArgs& args) {
  if (device.is_cpu()) return kernels::prologue_cpu(args);
#if defined(TORCHFUSE_WITH_CUDA)
  ops::check_status(kL2Norm, kernels::prologue_cuda(args, ops::current_stream(device)));
#endif
}

/// Writes the sums that the prologue adds. `partials` is memory for a CUDA device's partials.
void sum_bucket(const ops::Bucket& bucket, kernels::NormPartial* sums,
                [[maybe_unused]] kernels::NormPartial* partials) {
  const c10::Device& device = bucket.key.device;
  kernels::L2NormArgs args{bucket.table(), bucket.chunk_offsets.data(), sums, bucket.chunk};
  if (device.is_cpu()) {
    ops::parallel_over_elements(args.tensors.total(),
                                [&](kernels::CpuIsa isa, std::int64_t begin, std::int64_t end) {
                                  kernels::multi_tensor_l2_norm_cpu(isa, args, begin, end);
                                });
    return;
  }
#if defined(TORCHFUSE_WITH_CUDA)
  const kernels::Stream stream = ops::current_stream(device);
  const at::Tensor arrivals =
      ops::zeroed_arrivals(device, stream, kernels::num_norm_arrivals(bucket.num_partials()));
  args.partials = partials;
  bool prologue_done = false;
  const kernels::Status status = kernels::multi_tensor_l2_norm_cuda(
      args, {sums, static_cast<std::uint32_t*>(arrivals.mutable_data_ptr())}, nullptr,
      &prologue_done, stream);
  if (!status.ok()) ops::forget_arrivals(device, stream);
  ops::check_status(kL2Norm, status);
#endif
}

NormAndFlag l2_norm_impl(at::TensorList tensors) {
  ops::TensorList list(kL2Norm, "tensors", tensors);
  const c10::OptionalDeviceGuard guard(list.device());
  const auto options = at::TensorOptions().device(list.device());
  std::int64_t num_sums = 0;
  std::int64_t num_partials = 0;
  std::int64_t total = 0;
  for (const ops::Bucket& bucket : list.buckets()) total += bucket.offsets.back();
  for (ops::Bucket& bucket : list.buckets()) {
    bucket.divide(total);
    num_sums += bucket.num_sums();
    if (list.device().is_cuda()) num_partials = std::max(num_partials, bucket.num_partials());
  }
  constexpr std::int64_t kDoubles = sizeof(kernels::NormPartial) / sizeof(double);
  const at::Tensor workspace =
      at::empty({(num_sums + num_partials) * kDoubles}, options.dtype(at::kDouble));
  auto* sums = static_cast<kernels::NormPartial*>(workspace.mutable_data_ptr());
  kernels::NormPartial* const partials = sums + num_sums;
  const at::Tensor scalars =
      at::empty({static_cast<std::int64_t>(sizeof(kernels::StepScalars) / sizeof(float))},
                options.dtype(at::kFloat));
  const at::Tensor found_inf = at::empty({}, options.dtype(at::kFloat));

  kernels::PrologueArgs prologue;
  prologue.params.found_inf = found_inf.mutable_data_ptr<float>();
  prologue.params.found_inf_is_output = prologue.params.check = true;
  prologue.params.has_norm = true;
  prologue.partials = sums;
  prologue.num_partials = num_sums;
  prologue.scalars = static_cast<kernels::StepScalars*>(scalars.mutable_data_ptr());
  for (const ops::Bucket& bucket : list.buckets()) {
    sum_bucket(bucket, sums, partials);
    sums += bucket.num_sums();
  }
  run_prologue(list.device(), prologue);
  return {scalars.select(0, offsetof(kernels::StepScalars, total_norm) / sizeof(float)).clone(),
          found_inf};
}

NormAndFlag l2_norm_meta(at::TensorList tensors) {
  const auto options =
      (tensors.empty() ? at::TensorOptions() : tensors[0].options()).dtype(at::kFloat);
  return {at::empty({}, options), at::empty({}, options)};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> multi_tensor_l2_norm(at::TensorList tensors) {
  return ops::call_op<multi_tensor_l2_norm>("torchfuse::multi_tensor_l2_norm", tensors);
}

TORCH_LIBRARY_FRAGMENT(torchfuse, m) {
  ops::register_op<l2_norm_impl, l2_norm_meta>(m, "multi_tensor_l2_norm");
}

}  // namespace torchfuse
