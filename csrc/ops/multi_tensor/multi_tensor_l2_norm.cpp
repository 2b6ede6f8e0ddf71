// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/multi_tensor_l2_norm.h"

#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>
#include <torchfuse/ops.h>

#include "ops/backend.h"
#include "ops/multi_tensor/tensor_list.h"

namespace torchfuse {

namespace {

constexpr const char* kL2Norm = "multi_tensor_l2_norm";

using NormAndFlag = std::tuple<at::Tensor, at::Tensor>;

/// The prologue also serves here: its scalars hold the norm, and it raises the flag.
void run_prologue(const c10::Device& device, const kernels::PrologueArgs& args) {
  if (device.is_cpu()) return kernels::prologue_cpu(args);
#if defined(TORCHFUSE_WITH_CUDA)
  ops::check_status(kL2Norm, kernels::prologue_cuda(args, ops::current_stream(device)));
#endif
}

void sum_bucket(const ops::Bucket& bucket, kernels::NormPartial* partials) {
  const kernels::L2NormArgs args{bucket.table(), bucket.chunk_offsets.data(), partials};
  if (bucket.key.device.is_cpu()) {
    ops::parallel_over_elements(args.tensors.total(),
                                [&](kernels::CpuIsa isa, std::int64_t begin, std::int64_t end) {
                                  kernels::multi_tensor_l2_norm_cpu(isa, args, begin, end);
                                });
    return;
  }
#if defined(TORCHFUSE_WITH_CUDA)
  bool prologue_done = false;
  ops::check_status(kL2Norm,
                    kernels::multi_tensor_l2_norm_cuda(args, nullptr, nullptr, &prologue_done,
                                                       ops::current_stream(bucket.key.device)));
#endif
}

NormAndFlag l2_norm_impl(at::TensorList tensors) {
  ops::TensorList list(kL2Norm, "tensors", tensors);
  const c10::OptionalDeviceGuard guard(list.device());
  const auto options = at::TensorOptions().device(list.device());
  std::int64_t num_partials = 0;
  for (const ops::Bucket& bucket : list.buckets()) num_partials += bucket.num_partials();
  constexpr std::int64_t kDoubles = sizeof(kernels::NormPartial) / sizeof(double);
  const at::Tensor workspace = at::empty({num_partials * kDoubles}, options.dtype(at::kDouble));
  auto* partials = static_cast<kernels::NormPartial*>(workspace.mutable_data_ptr());
  const at::Tensor scalars =
      at::empty({static_cast<std::int64_t>(sizeof(kernels::StepScalars) / sizeof(float))},
                options.dtype(at::kFloat));
  const at::Tensor found_inf = at::zeros({}, options.dtype(at::kFloat));

  kernels::PrologueArgs prologue;
  prologue.params.found_inf = found_inf.mutable_data_ptr<float>();
  prologue.params.check = true;
  prologue.params.has_norm = true;
  prologue.partials = partials;
  prologue.num_partials = num_partials;
  prologue.scalars = static_cast<kernels::StepScalars*>(scalars.mutable_data_ptr());
  for (const ops::Bucket& bucket : list.buckets()) {
    sum_bucket(bucket, partials);
    partials += bucket.num_partials();
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
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torchfuse::multi_tensor_l2_norm", "")
                             .typed<decltype(l2_norm_impl)>();
  return op.call(tensors);
}

TORCH_LIBRARY_IMPL(torchfuse, CPU, m) { m.impl("multi_tensor_l2_norm", l2_norm_impl); }
TORCH_LIBRARY_IMPL(torchfuse, CUDA, m) { m.impl("multi_tensor_l2_norm", l2_norm_impl); }
// An empty list carries no device.
TORCH_LIBRARY_IMPL(torchfuse, CompositeExplicitAutograd, m) {
  m.impl("multi_tensor_l2_norm", l2_norm_impl);
}
TORCH_LIBRARY_IMPL(torchfuse, Meta, m) { m.impl("multi_tensor_l2_norm", l2_norm_meta); }

}  // namespace torchfuse
