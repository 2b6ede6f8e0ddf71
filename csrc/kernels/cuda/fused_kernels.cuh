// SPDX-License-Identifier: BSD-3-Clause
// The kernels of all optimizers. One body serves elementwise and layerwise functors, known and
// looked-up storage types, and the update and measure phases.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/common/math.h"
#include "kernels/common/shared.h"
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/ema_access.cuh"
#include "kernels/cuda/lanes.cuh"
#include "kernels/cuda/launch_table.cuh"
#include "kernels/cuda/phases.cuh"

namespace torchfuse::kernels::cuda {

/// Data that one row's elements share, in shared memory.
template <class Access>
struct Team : Access::TeamData {
  typename Access::Functor::template Coefs<typename Access::Compute> coefs;
  typename Access::Compute rescale;  ///< 1, or 2^-126 if the gradient's factor is tiny
};

template <class Access>
struct TeamsShared {
  Team<Access> teams[kWarps];
};

/// Data that one chunk's elements share. Operands point to the chunk's first element.
template <class Access>
struct Chunk : Access::ChunkData {
  unsigned char* operands[Access::kOperands];
  bool uses_state[Access::kStates];
  bool write_back_grads;
  GradCoef<typename Access::Compute> grad_coef;
  const Team<Access>* team;
};

template <class Phase>
__device__ __forceinline__ Chunk<typename Phase::Access> chunk_of(
    const Launch<Phase>& launch, const FoundRow<Phase>& found, const RowShare& share,
    const Team<typename Phase::Access>& team) {
  using Access = typename Phase::Access;
  const auto& params = launch.groups[found.group];
  Chunk<Access> chunk;
#pragma unroll
  for (int o = 0; o < Access::kOperands; ++o) {
    chunk.operands[o] = static_cast<unsigned char*>(found.row.operands[o]) +
                        share.begin * static_cast<std::int64_t>(launch.element_size(o));
  }
#pragma unroll
  for (int k = 0; k < Access::kStates; ++k) {
    chunk.uses_state[k] = Phase::Functor::uses_state(params, k);
  }
  chunk.write_back_grads = launch.write_back_grads;
  chunk.grad_coef = grad_coef_of<typename Access::Compute>(launch.scalars->grad_coef);
  chunk.team = &team;
  chunk.set(launch);
  return chunk;
}

/// Prefetches the calling thread's first vector of every operand that the phase reads.
template <class Phase>
__device__ __forceinline__ void prefetch_vector(const Launch<Phase>& launch,
                                                const FoundRow<Phase>& found,
                                                const RowShare& share) {
  using Access = typename Phase::Access;
  const std::uint32_t index = (Phase::kMeasures ? 0 : found.head) + share.rank * Access::kVec;
  if (index >= share.count) return;
#pragma unroll
  for (int o = 0; o < Access::kOperands; ++o) {
    if (!reads_operand(launch, launch.groups[found.group], o)) continue;
    prefetch(static_cast<const unsigned char*>(found.row.operands[o]) +
             (share.begin + index) * static_cast<std::int64_t>(launch.element_size(o)));
  }
}

/// Applies the phase's formula to `kLanes` of the elements, from element `first` on, which is
/// element `place` of a vector.
template <class Phase, int kLanes, class Access, class T, int kCount>
__device__ __forceinline__ void apply(const Chunk<Access>& chunk, T (&params)[kCount],
                                      const T (&grads)[kCount],
                                      T (&states)[Access::kStates][kCount], int first,
                                      [[maybe_unused]] int place,
                                      [[maybe_unused]] typename Phase::Sums& sums) {
  using Functor = typename Phase::Functor;
  using Values = Lanes<T, kLanes>;
  Values param = Values::of(params, first);
  Values state[Access::kStates];
#pragma unroll
  for (int k = 0; k < Access::kStates; ++k) state[k] = Values::of(states[k], first);
  if constexpr (Phase::kMeasures) {
    if constexpr (Phase::kMovesStates) {
      Functor::move(param, Values::of(grads, first), state, chunk.team->coefs);
#pragma unroll
      for (int k = 0; k < Access::kStates; ++k) {
        state[k] = each_lane<T, kLanes>([&](int i) {
          return Access::stored(chunk, Access::kStateOperand + k, state[k].lane[i]);
        });
      }
    }
    Values measured[Functor::kNumNorms];
    Functor::measure(param, Values::of(grads, first), state, chunk.team->coefs, measured);
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
#pragma unroll
      for (int n = 0; n < Functor::kNumNorms; ++n) {
        sums.norms[n].add(measured[n].lane[i], (place + i) % 4);
      }
    }
  } else {
    Functor::update(param, Values::of(grads, first), state, chunk.team->coefs);
  }
  param.put(params, first);
#pragma unroll
  for (int k = 0; k < Access::kStates; ++k) state[k].put(states[k], first);
}

/// Returns a gradient times its coefficient. A measure reads the second factor, which is almost
/// always 1, from shared memory each time, because the factor would otherwise take a register.
template <class Phase, class Access, class T>
__device__ __forceinline__ T scaled(const Chunk<Access>& chunk, T grad) {
  if constexpr (Phase::kMeasures && sizeof(T) < sizeof(double)) {
    const volatile T& rescale = chunk.team->rescale;
    return grad * chunk.grad_coef.factor * rescale;
  } else {
    return chunk.grad_coef.scaled(grad);
  }
}

/// Writes gradients times their coefficient. The products are in separate registers, so that later
/// code need not keep the unscaled values.
template <class Phase, class Access, bool kAligned>
__device__ __forceinline__ void write_back(const Chunk<Access>& chunk, std::uint32_t index,
                                           const typename Access::RawGrad& raw) {
  typename Access::RawGrad written;
#pragma unroll
  for (int group = 0; group < Access::kVec / Access::kGroup; ++group) {
    typename Access::Compute grad[Access::kGroup];
    Access::get(chunk, Access::kGradOperand, raw, group, grad);
#pragma unroll
    for (int i = 0; i < Access::kGroup; ++i) {
      grad[i] = Phase::kMeasures ? scaled<Phase>(chunk, grad[i]) : grad[i] * chunk.grad_coef.factor;
    }
    Access::set(written, group, grad);
  }
  Access::template store<kAligned>(chunk, Access::kGradOperand, index, written);
}

/// Handles the vector that begins at element `index`, if the gradient's factor is not tiny. All
/// loads are issued before the first value is used.
template <class Phase, bool kAligned, class Access>
__device__ __forceinline__ void handle_vector(const Chunk<Access>& chunk, std::uint32_t index,
                                              typename Phase::Sums& sums) {
  using T = typename Access::Compute;
  constexpr int kGroup = Access::kGroup;
  constexpr int kLanes = Divides<typename Access::Functor> && kGroup >= 4 ? 4 : 1;
  constexpr int kState = Access::kStateOperand;
  typename Access::RawSource raw_source;
  typename Access::RawGrad raw_grad = {};
  typename Access::RawState raw_state[Access::kStates] = {};
  EmaVec<Access> ema;
  Access::template load_source<kAligned>(chunk, index, raw_source);
  if constexpr (Phase::kReadsGrad) {
    Access::template load<kAligned>(chunk, Access::kGradOperand, index, raw_grad);
  }
#pragma unroll
  for (int k = 0; k < Access::kStates; ++k) {
    if (!Phase::kReadsStates || !chunk.uses_state[k]) continue;
    Access::template load<kAligned>(chunk, kState + k, index, raw_state[k]);
  }
  ema.template load<kAligned>(chunk, index);
  if (Phase::kMovesStates && chunk.write_back_grads) {
    write_back<Phase, Access, kAligned>(chunk, index, raw_grad);
  }
#pragma unroll
  for (int group = 0; group < Access::kVec / kGroup; ++group) {
    T param[kGroup];
    T grad[kGroup];
    T state[Access::kStates][kGroup];
    Access::get_source(chunk, raw_source, group, param);
    Access::get(chunk, Access::kGradOperand, raw_grad, group, grad);
#pragma unroll
    for (int k = 0; k < Access::kStates; ++k) {
      Access::get(chunk, kState + k, raw_state[k], group, state[k]);
    }
#pragma unroll
    for (T& value : grad) {
      value = Phase::kMeasures ? scaled<Phase>(chunk, value) : value * chunk.grad_coef.factor;
    }
#pragma unroll
    for (int first = 0; first < kGroup; first += kLanes) {
      apply<Phase, kLanes>(chunk, param, grad, state, first, kGroup * group + first, sums);
    }
    if constexpr (!Phase::kMeasures) Access::set(raw_source, group, param);
    ema.move(chunk, group, param);
#pragma unroll
    for (int k = 0; k < Access::kStates; ++k) Access::set(raw_state[k], group, state[k]);
  }
  if constexpr (!Phase::kMeasures) {
    Access::template store_source<kAligned>(chunk, index, raw_source);
  }
  ema.template store<kAligned>(chunk, index);
#pragma unroll
  for (int k = 0; k < Access::kStates; ++k) {
    if (!Phase::kMovesStates || !chunk.uses_state[k]) continue;
    Access::template store<kAligned>(chunk, kState + k, index, raw_state[k]);
  }
}

/// Handles element `index` alone, before or after the vectors.
template <class Phase, class Access>
__device__ __forceinline__ void handle_single(const Chunk<Access>& chunk, std::uint32_t index,
                                              typename Phase::Sums& sums) {
  using T = typename Access::Compute;
  using Grad = typename Access::Grad;
  using State = typename Access::State;
  constexpr int kState = Access::kStateOperand;
  T param[] = {Access::load_source_one(chunk, index)};
  T grad[] = {T(0)};
  if constexpr (Phase::kReadsGrad) {
    grad[0] = Access::template load_one<Grad>(chunk, Access::kGradOperand, index);
    grad[0] = scaled<Phase>(chunk, grad[0]);
  }
  T state[Access::kStates][1];
#pragma unroll
  for (int k = 0; k < Access::kStates; ++k) {
    state[k][0] = T(0);
    if (!Phase::kReadsStates || !chunk.uses_state[k]) continue;
    state[k][0] = Access::template load_one<State>(chunk, kState + k, index);
  }
  apply<Phase, 1>(chunk, param, grad, state, 0, 0, sums);
  if constexpr (!Phase::kMeasures) Access::store_source_one(chunk, index, param[0]);
  EmaVec<Access>::move_one(chunk, index, param[0]);
  if constexpr (Phase::kMovesStates) {
#pragma unroll
    for (int k = 0; k < Access::kStates; ++k) {
      if (!chunk.uses_state[k]) continue;
      Access::template store_one<State>(chunk, kState + k, index, state[k][0]);
    }
    if (chunk.write_back_grads) {
      Access::template store_one<Grad>(chunk, Access::kGradOperand, index, grad[0]);
    }
  }
}

/// Handles the calling thread's share of a chunk. See Note [Peeling]. An update handles single
/// elements first, because after the loop they would keep base addresses alive through the loop.
/// Sums handle single elements last, and peel nothing. If the gradient's factor is tiny, all
/// elements are handled as single elements: a second factor in the vector loop would take registers
/// from all steps for a very rare case. (Sums then have another order than on the CPU.)
template <class Phase, bool kAligned, class Access>
__device__ __forceinline__ void handle_chunk(const Chunk<Access>& chunk, const RowShare& share,
                                             std::uint32_t row_head, typename Phase::Sums& sums) {
  constexpr std::uint32_t kVec = Access::kVec;
  constexpr bool kMayBeTiny =
      !Phase::kMeasures && Phase::kReadsGrad && sizeof(typename Access::Compute) < sizeof(double);
  const bool all_single = kMayBeTiny && chunk.grad_coef.tiny;
  const std::uint32_t peeled = Phase::kMeasures ? 0 : row_head;
  const std::uint32_t wanted_head = all_single ? share.count : peeled;
  const std::uint32_t head = wanted_head < share.count ? wanted_head : share.count;
  const std::uint32_t tail = share.count - (share.count - head) % kVec;
  const std::uint32_t singles = head + (share.count - tail);
  const auto handle_vectors = [&](auto aligned) {
#pragma unroll 1
    for (std::uint32_t i = share.rank; head + i * kVec < tail; i += share.size) {
      handle_vector<Phase, decltype(aligned)::value>(chunk, head + i * kVec, sums);
    }
  };
  if constexpr (!Phase::kMeasures) {
#pragma unroll 1
    for (std::uint32_t i = share.rank; i < singles; i += share.size) {
      handle_single<Phase>(chunk, i < head ? i : tail + (i - head), sums);
      if constexpr (!kMayBeTiny) break;  // fewer elements than threads
    }
    handle_vectors(std::bool_constant<kAligned>{});
  } else {
    if (!Access::kAlignedMeasure || row_head == kMisaligned) {
      handle_vectors(std::false_type{});
    } else {
      handle_vectors(std::bool_constant<Access::kAlignedMeasure>{});
    }
    if (share.rank < singles) handle_single<Phase>(chunk, tail + share.rank, sums);
  }
}

/// Writes a chunk's partials. All threads of the block must call this function.
template <class Phase>
__device__ __forceinline__ void write_partials(const Launch<Phase>& launch, const RowShare& share,
                                               const typename Phase::Sums& sums) {
  constexpr int kNorms = Phase::Functor::kNumNorms;
#pragma unroll
  for (int n = 0; n < kNorms; ++n) {
    if (n > 0) __syncthreads();
    MeasurePartial partial = sums.norms[n].partial();
    partial = share.size == kThreads ? block_sum(partial) : warp_sum(partial);
    if (share.row >= 0 && share.rank == 0) {
      launch.table.rows[share.row].partials[share.chunk_index * kNorms + n] = partial;
    }
  }
}

/// The body of both kernels. One thread per team computes, in fp64, the data that the team's
/// elements share. Meanwhile the threads' first vectors are on their way to the L2 cache. Loads
/// into registers would need more of these than there are beside the fp64 computation.
template <class Phase, bool kAligned>
__device__ __forceinline__ void run_phase(const Launch<Phase>& launch) {
  using Access = typename Phase::Access;
  using Functor = typename Phase::Functor;
  // The search and both loads run in parallel. A skipped step also needs the count.
  const float skip = launch.scalars->skip;
  TeamsShared<Access>& shared = block_shared<TeamsShared<Access>>();
  const RowShare share = share_of<Phase, kAligned>(launch);
  const bool prepares = share.row >= 0 && share.rank == 0;
  const float step = prepares ? *find<Phase, kAligned>(launch, share.row).row.step : 0.0f;
  if (skip != 0.0f) return;
  if (share.row >= 0) {
    prefetch_vector(launch, find<Phase, kAligned>(launch, share.row), share);
  }
  if (prepares) {
    const FoundRow<Phase> found = find<Phase, kAligned>(launch, share.row);
    const auto& params = launch.groups[found.group];
    auto coefs = Functor::template prepare<typename Access::Compute>(
        params, own_step<Functor>(step, found.row.start));
    if constexpr (Layerwise<Functor> && !Phase::kMeasures) {
      Functor::apply_norms(params, found.row.norms, coefs);
    }
    shared.teams[share.team].set(launch, found.row, share.begin, step);
    shared.teams[share.team].coefs = coefs;
    if constexpr (Phase::kMeasures) {
      shared.teams[share.team].rescale =
          grad_coef_of<typename Access::Compute>(launch.scalars->grad_coef).rescale();
    }
  }
  __syncthreads();

  typename Phase::Sums sums{};
  if (share.row >= 0) {
    const FoundRow<Phase> found = find<Phase, kAligned>(launch, share.row);
    const auto chunk = chunk_of(launch, found, share, shared.teams[share.team]);
    handle_chunk<Phase, kAligned>(chunk, share, found.head, sums);
  }
  if constexpr (Phase::kMeasures) write_partials(launch, share, sums);
}

// A block handles one chunk of a parameter, a warp one small parameter. Bytes per element: all
// operands, read once and, except for the gradient, written once (fp32 Adam: 16 + 12). Every
// operand, of any type, has 16-byte accesses. Misaligned operands are handled as in Note [Peeling],
// in a separate kernel, so that the common kernel needs fewer registers. A launch has kBytes of
// arguments: see Note [Short lists].
template <class Access, bool kAligned, std::size_t kBytes>
__global__ void __launch_bounds__(kThreads, kAligned ? Access::kUpdateBlocksPerSm : 1)
    fused_update_kernel(const Launch<Update<Access, kBytes>> __grid_constant__ launch) {
  run_phase<Update<Access, kBytes>, kAligned>(launch);
}

// A block handles one chunk of kNormChunk elements, a warp one small parameter. Each chunk gives
// one partial per norm. Bytes per element: parameter and gradient, and also the states if the phase
// updates them (fp32 LAMB: 16 + 8). Which thread measures which element depends only on the chunk's
// size, so heads are not peeled: misaligned operands are accessed with the width that their address
// allows.
template <class Access>
__global__ void __launch_bounds__(kThreads, Access::kMeasureBlocksPerSm)
    fused_measure_kernel(const Launch<Measure<Access>> __grid_constant__ launch) {
  run_phase<Measure<Access>, true>(launch);
}

}  // namespace torchfuse::kernels::cuda
