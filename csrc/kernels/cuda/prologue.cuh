// SPDX-License-Identifier: BSD-3-Clause
// The prologue as one device function for its two callers: the last block of the norm kernel and
// the one-block kernel of prologue_cuda.cu.
#pragma once

#include <cstdint>

#include "kernels/common/shared.h"
#include "kernels/common/status.h"
#include "kernels/common/stream.h"
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/functors/prologue.h"

namespace torchfuse::kernels::cuda {

/// What the prologue needs apart from its step counts.
struct PrologueInputs {
  PrologueParams params;
  const NormPartial* partials;
  std::int64_t num_partials;
  StepScalars* scalars;
};

struct PrologueShared {
  float skip;
};

/// Called by all threads of one block of kThreads threads.
__device__ __forceinline__ void run_prologue(const PrologueInputs& inputs, float* const* steps,
                                             std::int32_t num_steps) {
  PrologueShared& shared = block_shared<PrologueShared>();
  const NormPartial sums = sum_partials(inputs.partials, inputs.num_partials);
  if (threadIdx.x == 0) {
    const StepScalars scalars = step_scalars(inputs.params, sums);
    *inputs.scalars = scalars;
    shared.skip = scalars.skip;
  }
  __syncthreads();
  if (shared.skip != 0.0f) return;
  for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < num_steps;
       i += static_cast<std::int32_t>(kThreads)) {
    *steps[i] += 1.0f;
  }
}

/// Enqueues step counts += 1 for a host array of device pointers, unless scalars->skip is set. For
/// those that did not fit into the launch that ran the prologue.
Status grow_steps(const StepScalars* scalars, float* const* steps, std::int64_t count,
                  Stream stream);

}  // namespace torchfuse::kernels::cuda
