// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/amp_update_scale.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <torch/library.h>
#include <torchfuse/ops.h>

#include <limits>

#include "ops/backend.h"
#include "ops/check.h"
#include "ops/functional_step.h"

namespace torchfuse {

namespace {

constexpr const char* kOp = "amp_update_scale_";

void check_arguments(const at::Tensor& scale, const at::Tensor& growth_tracker,
                     const at::Tensor& found_inf,
                     const std::optional<at::Tensor>& hysteresis_tracker, std::int64_t hysteresis) {
  ops::check_scalar({kOp, "scale"}, scale, at::kFloat);
  ops::check_backend(kOp, scale.device());
  ops::check_scalar({kOp, "growth_tracker"}, growth_tracker, at::kInt);
  ops::check_scalar({kOp, "found_inf"}, found_inf, at::kFloat);
  ops::check_writable({kOp, "scale"}, scale);
  ops::check_same_device({kOp, "growth_tracker"}, growth_tracker, scale.device(), "scale");
  ops::check_same_device({kOp, "found_inf"}, found_inf, scale.device(), "scale");
  TORCH_CHECK(hysteresis >= 1 && hysteresis <= std::numeric_limits<std::int32_t>::max(), kOp,
              ": expected hysteresis to be a number of at least 1, got ", hysteresis, ".");
  if (hysteresis_tracker) {
    ops::check_scalar({kOp, "hysteresis_tracker"}, *hysteresis_tracker, at::kInt);
    ops::check_same_device({kOp, "hysteresis_tracker"}, *hysteresis_tracker, scale.device(),
                           "scale");
  }
  TORCH_CHECK(hysteresis == 1 || hysteresis_tracker, kOp,
              ": expected hysteresis_tracker to be a tensor when hysteresis is ", hysteresis,
              ", got none.");
}

void run(const c10::Device& device, const kernels::UpdateScaleArgs& args) {
  if (device.is_cpu()) return kernels::amp_update_scale_cpu(args);
#if defined(TORCHFUSE_WITH_CUDA)
  const c10::OptionalDeviceGuard guard(device);
  ops::check_status(kOp, kernels::amp_update_scale_cuda(args, ops::current_stream(device)));
#endif
}

void update_scale_impl(const at::Tensor& scale, const at::Tensor& growth_tracker,
                       const at::Tensor& found_inf, double growth_factor, double backoff_factor,
                       std::int64_t growth_interval,
                       const std::optional<at::Tensor>& hysteresis_tracker,
                       std::int64_t hysteresis) {
  check_arguments(scale, growth_tracker, found_inf, hysteresis_tracker, hysteresis);
  kernels::UpdateScaleArgs args;
  args.scale = scale.mutable_data_ptr<float>();
  args.growth_tracker = growth_tracker.mutable_data_ptr<std::int32_t>();
  args.found_inf = found_inf.const_data_ptr<float>();
  if (hysteresis_tracker)
    args.hysteresis_tracker = hysteresis_tracker->mutable_data_ptr<std::int32_t>();
  args.params.growth_factor = growth_factor;
  args.params.backoff_factor = backoff_factor;
  args.params.growth_interval = growth_interval;
  args.params.hysteresis = static_cast<std::int32_t>(hysteresis);
  run(scale.device(), args);
  ops::mark_written(scale);
  ops::mark_written(growth_tracker);
  if (hysteresis_tracker) ops::mark_written(*hysteresis_tracker);
}

}  // namespace

void amp_update_scale_(const at::Tensor& scale, const at::Tensor& growth_tracker,
                       const at::Tensor& found_inf, double growth_factor, double backoff_factor,
                       std::int64_t growth_interval,
                       const std::optional<at::Tensor>& hysteresis_tracker,
                       std::int64_t hysteresis) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torchfuse::amp_update_scale_", "")
                             .typed<decltype(update_scale_impl)>();
  op.call(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval,
          hysteresis_tracker, hysteresis);
}

TORCH_LIBRARY_IMPL(torchfuse, CPU, m) { m.impl("amp_update_scale_", update_scale_impl); }
TORCH_LIBRARY_IMPL(torchfuse, CUDA, m) { m.impl("amp_update_scale_", update_scale_impl); }
// Other layouts and devices get our error.
TORCH_LIBRARY_IMPL(torchfuse, CompositeExplicitAutograd, m) {
  m.impl("amp_update_scale_", update_scale_impl);
}
TORCH_LIBRARY_IMPL(torchfuse, Meta, m) {
  m.impl("amp_update_scale_", torch::CppFunction::makeFromBoxedFunction<&ops::trace_only>());
}

}  // namespace torchfuse
