// SPDX-License-Identifier: BSD-3-Clause
// The loss scale's update on the device.
#include "kernels/amp_update_scale.h"

#include "kernels/cuda/launch_table.cuh"

namespace torchfuse::kernels {

namespace cuda {
namespace {

// One thread reads and writes the scale and its trackers, 16 bytes in all.
__global__ void amp_update_scale_kernel(const __grid_constant__ UpdateScaleArgs args) {
  // Without a tracker there is one unit of hysteresis: every overflow backs off.
  const std::int32_t hysteresis = args.hysteresis_tracker == nullptr ? 1 : *args.hysteresis_tracker;
  const ScaleState state =
      update_scale({*args.scale, *args.growth_tracker, hysteresis}, *args.found_inf, args.params);
  *args.scale = state.scale;
  *args.growth_tracker = state.growth_tracker;
  if (args.hysteresis_tracker != nullptr) *args.hysteresis_tracker = state.hysteresis_tracker;
}

}  // namespace
}  // namespace cuda

Status amp_update_scale_cuda(const UpdateScaleArgs& args, Stream stream) {
  return cuda::launch(cuda::amp_update_scale_kernel, args, 1, 1, stream,
                      "launch of amp_update_scale_kernel");
}

}  // namespace torchfuse::kernels
