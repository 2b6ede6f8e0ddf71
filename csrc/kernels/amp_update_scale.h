// SPDX-License-Identifier: BSD-3-Clause
// Updates the loss scale, on one thread. See functors/scale_update.h.
#pragma once

#include <cstdint>

#include "kernels/common/macros.h"
#include "kernels/common/status.h"
#include "kernels/common/stream.h"
#include "kernels/functors/scale_update.h"

namespace torchfuse::kernels {

struct UpdateScaleArgs {
  float* scale = nullptr;
  std::int32_t* growth_tracker = nullptr;
  std::int32_t* hysteresis_tracker = nullptr;  ///< null: no hysteresis (1)
  const float* found_inf = nullptr;
  ScaleUpdateParams params;
  ScaleCounts* counts = nullptr;  ///< null: updates are not counted
  /// Ring buffer of the last updates. Requires `counts`, which determines where the ring begins.
  ScaleRecord* history = nullptr;
  std::int64_t history_size = 0;
};

/// Runs the update, on the host or on one device thread.
TORCHFUSE_HOST_DEVICE void update_scale(const UpdateScaleArgs& args) {
  const float found_inf = *args.found_inf;
  if (args.counts != nullptr) {
    const std::int64_t row = args.history_size > 0 ? args.counts->updates % args.history_size : 0;
    const ScaleRecord record = count_update(*args.counts, *args.scale, found_inf);
    if (args.history_size > 0) args.history[row] = record;
  }
  // Without a tracker, hysteresis is 1: every overflow backs off.
  const std::int32_t hysteresis = args.hysteresis_tracker == nullptr ? 1 : *args.hysteresis_tracker;
  const ScaleState state =
      update_scale({*args.scale, *args.growth_tracker, hysteresis}, found_inf, args.params);
  *args.scale = state.scale;
  *args.growth_tracker = state.growth_tracker;
  if (args.hysteresis_tracker != nullptr) *args.hysteresis_tracker = state.hysteresis_tracker;
}

void amp_update_scale_cpu(const UpdateScaleArgs& args);
Status amp_update_scale_cuda(const UpdateScaleArgs& args, Stream stream);

}  // namespace torchfuse::kernels
