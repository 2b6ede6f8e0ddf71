// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/amp_update_scale.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <torch/library.h>
#include <torchfuse/ops.h>

#include <limits>

#include "ops/backend.h"
#include "ops/check.h"
#include "ops/registration.h"

namespace torchfuse {

namespace {

constexpr const char* kUpdateScale = "amp_update_scale_";

using OptionalTensor = std::optional<at::Tensor>;

/// Checks memory that the update writes as an array of structs.
void check_records(const ops::Argument& argument, const at::Tensor& tensor, at::ScalarType dtype,
                   bool fits, const char* shape, const at::Device& device) {
  if (!fits || tensor.scalar_type() != dtype || !tensor.is_contiguous()) {
    ops::fail(argument, c10::str("be a contiguous tensor of shape ", shape, " and dtype ", dtype),
              c10::str("a tensor of shape ", tensor.sizes(), " and dtype ", tensor.scalar_type()));
  }
  ops::check_same_device(argument, tensor, device, "scale");
}

void check_tensors(const at::Tensor& scale, const at::Tensor& growth_tracker,
                   const at::Tensor& found_inf, const OptionalTensor& hysteresis_tracker,
                   const OptionalTensor& counts, const OptionalTensor& history) {
  ops::check_scalar({kUpdateScale, "scale"}, scale, at::kFloat);
  ops::check_backend(kUpdateScale, scale.device());
  ops::check_scalar({kUpdateScale, "growth_tracker"}, growth_tracker, at::kInt);
  ops::check_scalar({kUpdateScale, "found_inf"}, found_inf, at::kFloat);
  ops::check_writable({kUpdateScale, "scale"}, scale);
  ops::check_same_device({kUpdateScale, "growth_tracker"}, growth_tracker, scale.device(), "scale");
  ops::check_same_device({kUpdateScale, "found_inf"}, found_inf, scale.device(), "scale");
  if (hysteresis_tracker) {
    ops::check_scalar({kUpdateScale, "hysteresis_tracker"}, *hysteresis_tracker, at::kInt);
    ops::check_same_device({kUpdateScale, "hysteresis_tracker"}, *hysteresis_tracker,
                           scale.device(), "scale");
  }
  if (counts) {
    check_records({kUpdateScale, "counts"}, *counts, at::kLong, counts->numel() == 3, "[3]",
                  scale.device());
  }
  if (history) {
    check_records({kUpdateScale, "history"}, *history, at::kFloat,
                  history->dim() == 2 && history->size(0) > 0 && history->size(1) == 2, "[n, 2]",
                  scale.device());
    TORCH_CHECK(counts.has_value(), kUpdateScale,
                ": expected counts to be a tensor when there is a ", "history, got none.");
  }
}

kernels::ScaleUpdateParams read_params(double growth_factor, double backoff_factor,
                                       std::int64_t growth_interval, bool has_hysteresis_tracker,
                                       std::int64_t hysteresis, std::optional<double> min_scale,
                                       std::optional<double> max_scale, bool dynamic) {
  TORCH_CHECK(hysteresis >= 1 && hysteresis <= std::numeric_limits<std::int32_t>::max(),
              kUpdateScale, ": expected hysteresis to be a number of at least 1, got ", hysteresis,
              ".");
  TORCH_CHECK(hysteresis == 1 || has_hysteresis_tracker, kUpdateScale,
              ": expected hysteresis_tracker to be a tensor when hysteresis is ", hysteresis,
              ", got none.");
  kernels::ScaleUpdateParams params;
  params.growth_factor = growth_factor;
  params.backoff_factor = backoff_factor;
  params.growth_interval = growth_interval;
  params.hysteresis = static_cast<std::int32_t>(hysteresis);
  if (min_scale) params.min_scale = static_cast<float>(*min_scale);
  if (max_scale) params.max_scale = static_cast<float>(*max_scale);
  params.dynamic = dynamic;
  // Written so that NaN fails.
  TORCH_CHECK(params.min_scale >= 0.0f && params.min_scale <= params.max_scale &&
                  params.max_scale <= kernels::kLargestFloat,
              kUpdateScale, ": expected 0 <= min_scale <= max_scale within fp32, got min_scale ",
              params.min_scale, " and max_scale ", params.max_scale, ".");
  return params;
}

void run(const c10::Device& device, const kernels::UpdateScaleArgs& args) {
  if (device.is_cpu()) return kernels::amp_update_scale_cpu(args);
#if defined(TORCHFUSE_WITH_CUDA)
  const c10::OptionalDeviceGuard guard(device);
  ops::check_status(kUpdateScale,
                    kernels::amp_update_scale_cuda(args, ops::current_stream(device)));
#endif
}

void update_scale_impl(const at::Tensor& scale, const at::Tensor& growth_tracker,
                       const at::Tensor& found_inf, double growth_factor, double backoff_factor,
                       std::int64_t growth_interval, const OptionalTensor& hysteresis_tracker,
                       std::int64_t hysteresis, std::optional<double> min_scale,
                       std::optional<double> max_scale, bool dynamic, const OptionalTensor& counts,
                       const OptionalTensor& history) {
  check_tensors(scale, growth_tracker, found_inf, hysteresis_tracker, counts, history);
  kernels::UpdateScaleArgs args;
  args.params =
      read_params(growth_factor, backoff_factor, growth_interval, hysteresis_tracker.has_value(),
                  hysteresis, min_scale, max_scale, dynamic);
  args.scale = scale.mutable_data_ptr<float>();
  args.growth_tracker = growth_tracker.mutable_data_ptr<std::int32_t>();
  args.found_inf = found_inf.const_data_ptr<float>();
  if (hysteresis_tracker) {
    args.hysteresis_tracker = hysteresis_tracker->mutable_data_ptr<std::int32_t>();
  }
  if (counts) args.counts = static_cast<kernels::ScaleCounts*>(counts->mutable_data_ptr());
  if (history) {
    args.history = static_cast<kernels::ScaleRecord*>(history->mutable_data_ptr());
    args.history_size = history->size(0);
  }
  run(scale.device(), args);
  ops::mark_written(scale);
  ops::mark_written(growth_tracker);
  for (const OptionalTensor& written : {hysteresis_tracker, counts, history}) {
    if (written) ops::mark_written(*written);
  }
}

}  // namespace

void amp_update_scale_(const at::Tensor& scale, const at::Tensor& growth_tracker,
                       const at::Tensor& found_inf, double growth_factor, double backoff_factor,
                       std::int64_t growth_interval,
                       const std::optional<at::Tensor>& hysteresis_tracker, std::int64_t hysteresis,
                       std::optional<double> min_scale, std::optional<double> max_scale,
                       bool dynamic, const std::optional<at::Tensor>& counts,
                       const std::optional<at::Tensor>& history) {
  ops::call_op<amp_update_scale_>("torchfuse::amp_update_scale_", scale, growth_tracker, found_inf,
                                  growth_factor, backoff_factor, growth_interval,
                                  hysteresis_tracker, hysteresis, min_scale, max_scale, dynamic,
                                  counts, history);
}

TORCH_LIBRARY_FRAGMENT(torchfuse, m) {
  ops::register_op<update_scale_impl, ops::trace_only>(m, "amp_update_scale_");
}

}  // namespace torchfuse
