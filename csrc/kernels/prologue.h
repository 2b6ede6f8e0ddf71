// SPDX-License-Identifier: BSD-3-Clause
// Makes the step's decisions and increments the step counts, between K1 and K2. See
// functors/prologue.h.
#pragma once

#include <cstdint>

#include "kernels/common/status.h"
#include "kernels/common/step_scalars.h"
#include "kernels/common/stream.h"
#include "kernels/functors/prologue.h"

namespace torchfuse::kernels {

struct PrologueArgs {
  PrologueParams params;                  ///< pointers inside are on the step's device
  const NormPartial* partials = nullptr;  ///< summed in index order
  std::int64_t num_partials = 0;
  StepScalars* scalars = nullptr;  ///< written
  float* const* steps = nullptr;   ///< host array: step counts that grow by one unless skipped
  std::int64_t num_steps = 0;
};

void prologue_cpu(const PrologueArgs& args);

/// One block, and more launches for very long `steps`. Reads the host array before returning.
Status prologue_cuda(const PrologueArgs& args, Stream stream);

/// Sums the partials in index order: one device's contribution to a step on several devices.
void reduce_partials_cpu(const NormPartial* partials, std::int64_t count, NormPartial* sum);
Status reduce_partials_cuda(const NormPartial* partials, std::int64_t count, NormPartial* sum,
                            Stream stream);

}  // namespace torchfuse::kernels
