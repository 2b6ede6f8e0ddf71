// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/amp_update_scale.h"

#include "kernels/cpu/flush_denormals.h"

namespace torchfuse::kernels {

namespace {

__attribute__((noinline)) void update(const UpdateScaleArgs& args) {
  // Without a tracker there is one unit of hysteresis: every overflow backs off.
  const std::int32_t hysteresis = args.hysteresis_tracker == nullptr ? 1 : *args.hysteresis_tracker;
  const ScaleState state =
      update_scale({*args.scale, *args.growth_tracker, hysteresis}, *args.found_inf, args.params);
  *args.scale = state.scale;
  *args.growth_tracker = state.growth_tracker;
  if (args.hysteresis_tracker != nullptr) *args.hysteresis_tracker = state.hysteresis_tracker;
}

}  // namespace

void amp_update_scale_cpu(const UpdateScaleArgs& args) {
  const cpu::FlushDenormals flush;
  update(args);
}

}  // namespace torchfuse::kernels
