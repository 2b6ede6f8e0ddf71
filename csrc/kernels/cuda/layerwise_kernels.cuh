// SPDX-License-Identifier: BSD-3-Clause
// The kernels of the measure and norms phases. See Note [Layerwise optimizers].
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/common/math.h"
#include "kernels/common/shared.h"
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/fused_update_kernel.cuh"
#include "kernels/cuda/mixed_measure.cuh"
#include "kernels/cuda/thread_sums.cuh"
#include "kernels/layerwise_optimizer.h"

namespace torchfuse::kernels::cuda {

template <class Types>
struct MeasureRow {
  void* streams[Types::kStreams];
  float* step;
  std::int64_t numel;
  std::int64_t slot;  ///< of the tensor's first chunk
};

template <class Types>
struct MeasureLaunch : Types::Storage {
  using Row = MeasureRow<Types>;
  using Params = typename Types::Params;
  /// Each row also has its group.
  static constexpr int kRows =
      table_capacity(sizeof(Row) + 1, kMaxGroups<Params> * sizeof(Params) + 3 * sizeof(void*) +
                                          storage_bytes<Types>);

  LaunchTable<Row, kRows> table;
  Params groups[kMaxGroups<Params>];
  const StepScalars* scalars;
  MeasurePartial* partials;
  bool write_back_grads;
  std::uint8_t group[kRows];
};

template <class Types>
struct MeasureShared {
  typename Types::Coefs coefs[kWarps];  ///< by team
};

/// The vector that begins at element `index`. See Note [Peeling] for the widths.
template <class Types>
__device__ __forceinline__ void measure_vector(
    const UpdateChunk<Types>& chunk, std::uint32_t index,
    ThreadMeasure<typename Types::Compute> (&sums)[Types::Functor::kNumNorms]) {
  using T = typename Types::Compute;
  constexpr int kVec = Types::kVec;
  constexpr int kNorms = Types::Functor::kNumNorms;
  constexpr int kState = Types::kStateStream;
  RawVec<typename Types::Source, kVec> raw_source;
  RawVec<typename Types::Grad, kVec> raw_grad;
  RawVec<typename Types::State, kVec> raw_state[Types::kStates] = {};
  fetch<false>(chunk, Types::kSourceStream, index, raw_source);
  fetch<false>(chunk, Types::kGradStream, index, raw_grad);
  if constexpr (Types::kStatesMoved) {
#pragma unroll
    for (int k = 0; k < Types::kStates; ++k) {
      if (chunk.uses_state[k]) fetch<false>(chunk, kState + k, index, raw_state[k]);
    }
  }
#pragma unroll
  for (int pair = 0; pair < kVec / 2; ++pair) {
    T param[2];
    T grad[2];
    T state[Types::kStates][2];
    get_pair(raw_source, pair, param);
    get_pair(raw_grad, pair, grad);
#pragma unroll
    for (int k = 0; k < Types::kStates; ++k) get_pair(raw_state[k], pair, state[k]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      T element_state[Types::kStates];
#pragma unroll
      for (int k = 0; k < Types::kStates; ++k) element_state[k] = state[k][i];
      grad[i] = grad[i] * chunk.grad_coef;
      T measured[kNorms];
      Types::Functor::measure(param[i], grad[i], element_state, *chunk.coefs, measured);
#pragma unroll
      for (int n = 0; n < kNorms; ++n) sums[n].add(measured[n], (2 * pair + i) % 4);
#pragma unroll
      for (int k = 0; k < Types::kStates; ++k) state[k][i] = element_state[k];
    }
    set_pair(raw_grad, pair, grad);
#pragma unroll
    for (int k = 0; k < Types::kStates; ++k) set_pair(raw_state[k], pair, state[k]);
  }
  if constexpr (Types::kStatesMoved) {
#pragma unroll
    for (int k = 0; k < Types::kStates; ++k) {
      if (chunk.uses_state[k]) put<false>(chunk, kState + k, index, raw_state[k]);
    }
    if (chunk.write_back_grads) put<false>(chunk, Types::kGradStream, index, raw_grad);
  }
}

/// Element `index` by itself, behind the vectors.
template <class Types>
__device__ __forceinline__ void measure_single(
    const UpdateChunk<Types>& chunk, std::uint32_t index,
    ThreadMeasure<typename Types::Compute> (&sums)[Types::Functor::kNumNorms]) {
  using T = typename Types::Compute;
  using State = typename Types::State;
  using Grad = typename Types::Grad;
  constexpr int kState = Types::kStateStream;
  const T param = load_element<typename Types::Source>(chunk.streams[Types::kSourceStream], index);
  const T grad = load_element<Grad>(chunk.streams[Types::kGradStream], index) * chunk.grad_coef;
  T state[Types::kStates] = {};
  if constexpr (Types::kStatesMoved) {
#pragma unroll
    for (int k = 0; k < Types::kStates; ++k) {
      if (chunk.uses_state[k]) state[k] = load_element<State>(chunk.streams[kState + k], index);
    }
  }
  T measured[Types::Functor::kNumNorms];
  Types::Functor::measure(param, grad, state, *chunk.coefs, measured);
#pragma unroll
  for (int n = 0; n < Types::Functor::kNumNorms; ++n) sums[n].add(measured[n], 0);
  if constexpr (Types::kStatesMoved) {
#pragma unroll
    for (int k = 0; k < Types::kStates; ++k) {
      if (chunk.uses_state[k]) store_element<State>(chunk.streams[kState + k], index, state[k]);
    }
    if (chunk.write_back_grads) {
      store_element<Grad>(chunk.streams[Types::kGradStream], index, grad);
    }
  }
}

template <class Types>
constexpr bool kIsMixed = std::is_same_v<Types, MixedTypes<typename Types::Functor>>;

// A block handles one chunk of kNormChunk elements, a warp one small parameter; each writes one
// partial per norm. Bytes per element: parameter and gradient, and the states where they move (fp32
// LAMB 16 + 8). Which thread measures which element depends on the chunk's size alone, so heads are
// not peeled: misaligned streams are accessed with the width that their address allows.
template <class Types>
__global__ void __launch_bounds__(kThreads, kIsMixed<Types> ? 1 : 2)
    fused_measure_kernel(const MeasureLaunch<Types> __grid_constant__ launch) {
  using Functor = typename Types::Functor;
  using T = typename Types::Compute;
  constexpr int kNorms = Functor::kNumNorms;
  constexpr std::uint32_t kVec = Types::kVec;
  if (launch.scalars->skip != 0.0f) return;
  MeasureShared<Types>& shared = block_shared<MeasureShared<Types>>();
  const RowShare share = row_share(launch.table);
  const int known_row = share.row < 0 ? 0 : share.row;
  const auto& row = launch.table.rows[known_row];
  const typename Types::Params& params = launch.groups[launch.group[known_row]];
  if (share.row >= 0 && share.rank == 0) {
    shared.coefs[share.team] = Functor::template prepare<T>(params, static_cast<double>(*row.step));
  }
  __syncthreads();

  ThreadMeasure<T> sums[kNorms];
  if (share.row >= 0) {
    std::conditional_t<kIsMixed<Types>, MixedChunk<Functor>, UpdateChunk<Types>> chunk;
    if constexpr (kIsMixed<Types>) chunk.storage = &launch;
#pragma unroll
    for (int s = 0; s < Types::kStreams; ++s) {
      chunk.streams[s] = static_cast<unsigned char*>(row.streams[s]) +
                         share.begin * static_cast<std::int64_t>(launch.element_size(s));
    }
#pragma unroll
    for (int k = 0; k < Types::kStates; ++k) {
      chunk.uses_state[k] = Functor::uses_state(params, k);
    }
    chunk.write_back_grads = launch.write_back_grads;
    chunk.grad_coef = round_to<T>(launch.scalars->grad_coef);
    chunk.coefs = &shared.coefs[share.team];
    const std::uint32_t vectors = share.count / kVec;
#pragma unroll 1
    for (std::uint32_t i = share.rank; i < vectors; i += share.size) {
      measure_vector(chunk, i * kVec, sums);
    }
    const std::uint32_t tail = vectors * kVec + share.rank;
    if (tail < share.count) measure_single(chunk, tail, sums);
  }
#pragma unroll
  for (int n = 0; n < kNorms; ++n) {
    if (n > 0) __syncthreads();
    MeasurePartial partial = sums[n].partial();
    partial = share.size == kThreads ? block_sum(partial) : warp_sum(partial);
    if (share.row >= 0 && share.rank == 0) {
      launch.partials[(row.slot + share.chunk_index) * kNorms + n] = partial;
    }
  }
}

template <class Functor>
struct NormsRow {
  std::int64_t slot;
  std::int64_t num_slots;
  float* step;
  void* tensor_state;
  double* norms;
  MeasurePartial* sums;  ///< written instead of the norms, if not null
};

template <class Functor>
struct NormsLaunch {
  using Params = typename Functor::Params;
  /// Each row also has its group.
  static constexpr int kRows = table_capacity(
      sizeof(NormsRow<Functor>) + 1, kMaxGroups<Params> * sizeof(Params) + 3 * sizeof(void*));

  NormsRow<Functor> rows[kRows];
  Params groups[kMaxGroups<Params>];
  const StepScalars* scalars;
  const MeasurePartial* partials;
  std::int32_t count;
  std::uint8_t group[kRows];
};

// A block handles one tensor: it sums the partials (32 bytes each), every 256th by the same thread,
// in order, and writes the norms. T is the type of what is tracked. No alignment beyond the types'.
template <class Functor, class T>
__global__ void __launch_bounds__(kThreads)
    tensor_norms_kernel(const NormsLaunch<Functor> __grid_constant__ launch) {
  constexpr int kNorms = Functor::kNumNorms;
  if (launch.scalars->skip != 0.0f) return;
  const NormsRow<Functor>& row = launch.rows[blockIdx.x];
  MeasurePartial sums[kNorms];
#pragma unroll
  for (int n = 0; n < kNorms; ++n) {
    if (n > 0) __syncthreads();
    MeasurePartial sum{};
    for (std::int64_t i = threadIdx.x; i < row.num_slots; i += kThreads) {
      sum = sum + launch.partials[(row.slot + i) * kNorms + n];
    }
    sums[n] = block_sum(sum);
  }
  if (threadIdx.x != 0) return;
  if (row.sums != nullptr) {
#pragma unroll
    for (int n = 0; n < kNorms; ++n) row.sums[n] = sums[n];
    return;
  }
  finish_norms<Functor, T>(launch.groups[launch.group[blockIdx.x]], static_cast<double>(*row.step),
                           sums, row.tensor_state, row.norms);
}

}  // namespace torchfuse::kernels::cuda
