// SPDX-License-Identifier: BSD-3-Clause
// Updates the loss scale on the device.
#include "kernels/amp_update_scale.h"

#include "kernels/cuda/launch_table.cuh"

namespace torchfuse::kernels {

namespace cuda {
namespace {

// One thread reads and writes the scale, the trackers and the counts: at most 48 bytes.
__global__ void amp_update_scale_kernel(const UpdateScaleArgs __grid_constant__ args) {
  update_scale(args);
}

}  // namespace
}  // namespace cuda

Status amp_update_scale_cuda(const UpdateScaleArgs& args, Stream stream) {
  return cuda::launch(cuda::amp_update_scale_kernel, args, 1, 1, stream,
                      "launch of amp_update_scale_kernel");
}

}  // namespace torchfuse::kernels
