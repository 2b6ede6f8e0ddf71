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
  /// Number of consecutive overflows from which the scale backs off. 1 backs off at once, as in
  /// torch.
  std::int32_t hysteresis = 1;
  float min_scale = 0.0f;           ///< lower bound for backing off
  float max_scale = kLargestFloat;  ///< upper bound for growth
  bool dynamic = true;              ///< false: scale and trackers do not change
};

/// Counts over all updates so far.
struct ScaleCounts {
  std::int64_t updates = 0;
  std::int64_t overflows = 0;
  std::int64_t last_overflowed = 0;  ///< 0 or 1
};

/// One update's record, for a plot of the scale over time.
struct ScaleRecord {
  float scale;       ///< scale before the update, which the step used
  float overflowed;  ///< 0 or 1
};

struct ScaleState {
  float scale;
  std::int32_t growth_tracker;
  std::int32_t hysteresis_tracker;
};

/// An overflow uses up one unit of hysteresis, and backs off when none is left. A clean step
/// refills the hysteresis. After growth_interval clean steps the scale grows, unless it would
/// exceed fp32.
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

/// Counts one update and returns its record.
TORCHFUSE_HOST_DEVICE ScaleRecord count_update(ScaleCounts& counts, float scale, float found_inf) {
  const std::int64_t overflowed = found_inf != 0.0f ? 1 : 0;
  counts.updates += 1;
  counts.overflows += overflowed;
  counts.last_overflowed = overflowed;
  return {scale, static_cast<float>(overflowed)};
}

}  // namespace torchfuse::kernels
