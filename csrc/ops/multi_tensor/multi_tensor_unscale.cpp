// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/multi_tensor_unscale.h"

#include <c10/core/DeviceGuard.h>
#include <torch/library.h>
#include <torchfuse/ops.h>

#include <atomic>

#include "ops/backend.h"
#include "ops/multi_tensor/tensor_list.h"
#include "ops/multi_tensor/unscale_bucket.h"
#include "ops/registration.h"

namespace torchfuse {

namespace ops {

void unscale_bucket([[maybe_unused]] const char* op, const Bucket& bucket,
                    const c10::Device& device, const at::Tensor& found_inf,
                    const at::Tensor& inv_scale) {
  const kernels::UnscaleArgs args{bucket.table(), inv_scale.const_data_ptr<float>(),
                                  found_inf.mutable_data_ptr<float>()};
  if (device.is_cpu()) {
    std::atomic<bool> found{false};
    parallel_over_elements(args.tensors.total(),
                           [&](kernels::CpuIsa isa, std::int64_t begin, std::int64_t end) {
                             if (kernels::multi_tensor_unscale_cpu(isa, args, begin, end))
                               found = true;
                           });
    if (found) *args.found_inf = 1.0f;
    return;
  }
#if defined(TORCHFUSE_WITH_CUDA)
  check_status(op, kernels::multi_tensor_unscale_cuda(args, current_stream(device)));
#endif
}

}  // namespace ops

namespace {

constexpr const char* kUnscale = "multi_tensor_unscale_";

void unscale_impl(at::TensorList tensors, const at::Tensor& found_inf,
                  const at::Tensor& inv_scale) {
  ops::check_scalar({kUnscale, "found_inf"}, found_inf, at::kFloat);
  ops::check_scalar({kUnscale, "inv_scale"}, inv_scale, at::kFloat);
  ops::check_writable({kUnscale, "found_inf"}, found_inf);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    ops::check_writable({kUnscale, "tensors", static_cast<std::int64_t>(i)}, tensors[i]);
  }
  ops::TensorList list(kUnscale, "tensors", tensors);
  if (list.buckets().empty()) return;
  ops::check_same_device({kUnscale, "found_inf"}, found_inf, list.device(), "tensors");
  ops::check_same_device({kUnscale, "inv_scale"}, inv_scale, list.device(), "tensors");
  const c10::OptionalDeviceGuard guard(list.device());
  for (const ops::Bucket& bucket : list.buckets()) {
    ops::unscale_bucket(kUnscale, bucket, list.device(), found_inf, inv_scale);
  }
  list.copy_back();
  for (const at::Tensor& tensor : tensors) ops::mark_written(tensor);
  ops::mark_written(found_inf);
}

}  // namespace

void multi_tensor_unscale_(at::TensorList tensors, const at::Tensor& found_inf,
                           const at::Tensor& inv_scale) {
  ops::call_op<multi_tensor_unscale_>("torchfuse::multi_tensor_unscale_", tensors, found_inf,
                                      inv_scale);
}

TORCH_LIBRARY_FRAGMENT(torchfuse, m) {
  ops::register_op<unscale_impl, ops::trace_only>(m, "multi_tensor_unscale_");
}

}  // namespace torchfuse
