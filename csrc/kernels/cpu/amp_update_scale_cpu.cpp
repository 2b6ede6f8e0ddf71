// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/amp_update_scale.h"

#include "kernels/cpu/flush_denormals.h"

namespace torchfuse::kernels {

namespace {

// Out of line, because the compiler must not move the arithmetic before the flush.
__attribute__((noinline)) void update(const UpdateScaleArgs& args) { update_scale(args); }

}  // namespace

void amp_update_scale_cpu(const UpdateScaleArgs& args) {
  const cpu::FlushDenormals flush;
  update(args);
}

}  // namespace torchfuse::kernels
