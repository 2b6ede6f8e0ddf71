// SPDX-License-Identifier: BSD-3-Clause
// The loss scale's update, one thread. See functors/scale_update.h.
#pragma once

#include <cstdint>

#include "kernels/common/status.h"
#include "kernels/common/stream.h"
#include "kernels/functors/scale_update.h"

namespace torchfuse::kernels {

struct UpdateScaleArgs {
  float* scale = nullptr;
  std::int32_t* growth_tracker = nullptr;
  std::int32_t* hysteresis_tracker = nullptr;  ///< null: hysteresis is off (1)
  const float* found_inf = nullptr;
  ScaleUpdateParams params;
};

void amp_update_scale_cpu(const UpdateScaleArgs& args);
Status amp_update_scale_cuda(const UpdateScaleArgs& args, Stream stream);

}  // namespace torchfuse::kernels
