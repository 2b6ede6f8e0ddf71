// SPDX-License-Identifier: BSD-3-Clause
// The prologue as a device function with two callers: the norm kernel's last block, and the
// one-block kernel in prologue_cuda.cu.
#pragma once

#include <cstdint>

#include "kernels/common/shared.h"
#include "kernels/common/status.h"
#include "kernels/common/stream.h"
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/functors/prologue.h"

namespace torchfuse::kernels::cuda {

/// The prologue's inputs other than step counts.
struct PrologueInputs {
  PrologueParams params;
  const NormPartial* partials;
  std::int64_t num_partials;
  StepScalars* scalars;
};

/// Step counts that one launch increments. An optimizer's counts are adjacent (see Note [Step
/// counts in one buffer] in step_views.cpp), so the first address determines all.
template <int kPointers>
struct StepTable {
  std::int32_t count;
  bool in_a_row;
  float* steps[kPointers];  ///< only the first address if the counts are adjacent

  /// Stores the first of `available` counts, adjacent ones up to `most_in_a_row`. Returns how many
  /// counts it stored.
  std::int64_t take(float* const* source, std::int64_t available, std::int64_t most_in_a_row) {
    const auto address = [&](std::int64_t i) {
      return reinterpret_cast<std::uintptr_t>(source[i]);
    };
    std::int64_t row = 0;
    while (row < available && row < most_in_a_row &&
           address(row) - address(0) == static_cast<std::uintptr_t>(row) * sizeof(float)) {
      ++row;
    }
    in_a_row = row > kPointers || row == available;
    const std::int64_t pointers = available < kPointers ? available : kPointers;
    count = static_cast<std::int32_t>(in_a_row ? row : pointers);
    const std::int32_t stored = in_a_row && count > 0 ? 1 : count;
    for (std::int32_t i = 0; i < stored; ++i) steps[i] = source[i];
    return count;
  }

  __device__ __forceinline__ float* at(std::int32_t i) const {
    return in_a_row ? steps[0] + i : steps[i];
  }
};

/// Maximum number of adjacent counts: the prologue's block increments as many before another launch
/// would begin.
constexpr std::int64_t kMostStepsOfABlock = 4096;

struct PrologueShared {
  float skip;
};

/// All kThreads threads of a single block must call this function.
template <int kPointers>
__device__ __forceinline__ void run_prologue(const PrologueInputs& inputs,
                                             const StepTable<kPointers>& steps) {
  PrologueShared& shared = block_shared<PrologueShared>();
  const NormPartial sums = sum_partials(inputs.partials, inputs.num_partials);
  if (threadIdx.x == 0) {
    const StepScalars scalars = step_scalars(inputs.params, sums);
    *inputs.scalars = scalars;
    shared.skip = scalars.skip;
  }
  __syncthreads();
  if (shared.skip != 0.0f) return;
  constexpr std::int32_t kStride = static_cast<std::int32_t>(kThreads);
  constexpr int kLoads = 4;  ///< counts in flight per thread
  for (std::int32_t first = static_cast<std::int32_t>(threadIdx.x); first < steps.count;
       first += kLoads * kStride) {
    float values[kLoads] = {};
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (first + k * kStride < steps.count) values[k] = *steps.at(first + k * kStride);
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (first + k * kStride < steps.count) *steps.at(first + k * kStride) = values[k] + 1.0f;
    }
  }
}

/// Enqueues step counts += 1 for a host array of device pointers, unless scalars->skip is set. Used
/// for counts that did not fit the launch that ran the prologue.
Status grow_steps(const StepScalars* scalars, float* const* steps, std::int64_t count,
                  Stream stream);

}  // namespace torchfuse::kernels::cuda
