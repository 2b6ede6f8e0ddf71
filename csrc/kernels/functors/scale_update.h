// SPDX-License-Identifier: BSD-3-Clause
// The loss scale's update after a step: torch.amp's rule, with apex's hysteresis.
#pragma once

#include <cstdint>

#include "kernels/common/macros.h"

namespace torchfuse::kernels {

struct ScaleUpdateParams {
  double growth_factor = 2.0;
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;
  /// The scale backs off from this many overflows in a row on; 1 backs off at once, as torch does.
  std::int32_t hysteresis = 1;
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
  if (found_inf != 0.0f) {
    state.growth_tracker = 0;
    state.hysteresis_tracker -= 1;
    if (state.hysteresis_tracker <= 0) {
      state.scale = static_cast<float>(static_cast<double>(state.scale) * params.backoff_factor);
    }
    return state;
  }
  state.hysteresis_tracker = params.hysteresis;
  const std::int64_t successes = static_cast<std::int64_t>(state.growth_tracker) + 1;
  if (successes != params.growth_interval) {
    state.growth_tracker = static_cast<std::int32_t>(successes);
    return state;
  }
  const float grown = static_cast<float>(static_cast<double>(state.scale) * params.growth_factor);
  if (grown <= 0x1.fffffep127f) state.scale = grown;
  state.growth_tracker = 0;
  return state;
}

}  // namespace torchfuse::kernels
