// SPDX-License-Identifier: BSD-3-Clause
// The loss scale's update after a step: torch.amp's rule, with apex's hysteresis, bounds and
// counts.
#pragma once

#include <cstdint>

#include "kernels/common/macros.h"
#include "kernels/common/math.h"

namespace torchfuse::kernels {

constexpr float kLargestFloat = 0x1.fffffep127f;

struct ScaleUpdateParams {
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;
  /// The scale backs off from this many overflows in a row on; 1 backs off at once, as torch does.
  std::int32_t hysteresis = 1;
  float min_scale = 0.0f;           ///< no overflow takes the scale below
  float max_scale = kLargestFloat;  ///< no growth takes it above
  bool dynamic = true;              ///< false: the scale and its trackers stay as they are
};

/// What the updates so far have seen.
struct ScaleCounts {
  std::int64_t updates = 0;
  std::int64_t overflows = 0;
  std::int64_t last_overflowed = 0;  ///< 0 or 1
};

/// What one update has seen, for a plot of the scale over time.
struct ScaleRecord {
  float scale;       ///< before the update: the one that the step used
  float overflowed;  ///< 0 or 1
};

struct ScaleState {
  float scale;
  std::int32_t growth_tracker;
  std::int32_t hysteresis_tracker;
};

/// Overflow: use up one unit of hysteresis, and back off when none is left. A clean step refills
/// the hysteresis; after growth_interval clean steps the scale grows, unless it would leave fp32.
TORCHFUSE_HOST_DEVICE ScaleState update_scale(ScaleState state, float found_inf,
                                              const ScaleUpdateParams& params) {
  if (!params.dynamic) return state;
  if (found_inf != 0.0f) {
    state.growth_tracker = 0;
    state.hysteresis_tracker -= 1;
    if (state.hysteresis_tracker <= 0) {
      state.scale = round_to<float>(static_cast<double>(state.scale) * params.backoff_factor);
      if (state.scale < params.min_scale) state.scale = params.min_scale;
    }
    return state;
  }
  state.hysteresis_tracker = params.hysteresis;
  const std::int64_t successes = static_cast<std::int64_t>(state.growth_tracker) + 1;
  if (successes != params.growth_interval) {
    state.growth_tracker = static_cast<std::int32_t>(successes);
    return state;
  }
  const float grown = round_to<float>(static_cast<double>(state.scale) * params.growth_factor);
  if (grown <= kLargestFloat) state.scale = grown < params.max_scale ? grown : params.max_scale;
  state.growth_tracker = 0;
  return state;
}

/// Counts one update, and returns what there is to record of it.
TORCHFUSE_HOST_DEVICE ScaleRecord count_update(ScaleCounts& counts, float scale, float found_inf) {
  const std::int64_t overflowed = found_inf != 0.0f ? 1 : 0;
  counts.updates += 1;
  counts.overflows += overflowed;
  counts.last_overflowed = overflowed;
  return {scale, static_cast<float>(overflowed)};
}

}  // namespace torchfuse::kernels
