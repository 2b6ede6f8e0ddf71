// SPDX-License-Identifier: BSD-3-Clause
// The kernel of elementwise optimizers, for any functor and dtype tuple.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/math.h"
#include "kernels/common/shared.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/launch_table.cuh"
#include "kernels/cuda/update_types.cuh"
#include "kernels/cuda/vec.cuh"

namespace torchfuse::kernels::cuda {

/// What the elements of one chunk share. Streams point to the chunk's first element.
template <class Types>
struct UpdateChunk {
  unsigned char* streams[Types::kStreams];
  bool uses_state[Types::kStates];
  bool write_back_grads;
  typename Types::Compute grad_coef;
  const typename Types::Coefs* coefs;  ///< in shared memory
};

/// The width of accesses at `address`. Found anew for every vector where streams are misaligned:
/// three instructions, where widths kept for the loop would cost a register per stream.
template <bool kAligned>
__device__ __forceinline__ std::uint32_t access_width(const unsigned char* address) {
  return kAligned ? kVectorBytes : legal_width(reinterpret_cast<std::uintptr_t>(address));
}

/// Within a chunk 32 bits are enough.
template <class S>
__device__ __forceinline__ std::uint32_t byte_offset(std::uint32_t index) {
  return index * static_cast<std::uint32_t>(sizeof(S));
}

template <bool kAligned, class Types, class S>
__device__ __forceinline__ void fetch(const UpdateChunk<Types>& chunk, int stream,
                                      std::uint32_t index, RawVec<S, Types::kVec>& raw) {
  const unsigned char* address = chunk.streams[stream] + byte_offset<S>(index);
  load_vec<Keep::kStream>(raw, address, access_width<kAligned>(address));
}

template <bool kAligned, class Types, class S>
__device__ __forceinline__ void put(const UpdateChunk<Types>& chunk, int stream,
                                    std::uint32_t index, const RawVec<S, Types::kVec>& raw) {
  unsigned char* address = chunk.streams[stream] + byte_offset<S>(index);
  store_vec<Keep::kStream>(address, raw, access_width<kAligned>(address));
}

/// The vector that begins at element `index`. All loads are issued before the first value is used.
template <class Types, bool kAligned>
__device__ __forceinline__ void update_vector(const UpdateChunk<Types>& chunk,
                                              std::uint32_t index) {
  using T = typename Types::Compute;
  using Source = typename Types::Source;
  constexpr int kVec = Types::kVec;
  constexpr int kGrad = Types::kGradStream;
  constexpr int kState = Types::kStateStream;
  constexpr int kSource = Types::kSourceStream;
  RawVec<Source, kVec> raw_source;
  RawVec<typename Types::Grad, kVec> raw_grad = {};
  RawVec<typename Types::State, kVec> raw_state[Types::kStates] = {};
  fetch<kAligned>(chunk, kSource, index, raw_source);
  if constexpr (!Types::kStatesMoved) fetch<kAligned>(chunk, kGrad, index, raw_grad);
#pragma unroll
  for (int k = 0; k < Types::kStates; ++k) {
    if (chunk.uses_state[k]) fetch<kAligned>(chunk, kState + k, index, raw_state[k]);
  }

  if (!Types::kStatesMoved && chunk.write_back_grads) {
    // Ahead of the update, and in registers of its own: the update need not keep what it
    // multiplies.
    RawVec<typename Types::Grad, kVec> raw_scaled;
#pragma unroll
    for (int pair = 0; pair < kVec / 2; ++pair) {
      T grad[2];
      get_pair(raw_grad, pair, grad);
      const T scaled[2] = {grad[0] * chunk.grad_coef, grad[1] * chunk.grad_coef};
      set_pair(raw_scaled, pair, scaled);
    }
    put<kAligned>(chunk, kGrad, index, raw_scaled);
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
      Types::Functor::update(param[i], grad[i] * chunk.grad_coef, element_state, *chunk.coefs);
#pragma unroll
      for (int k = 0; k < Types::kStates; ++k) state[k][i] = element_state[k];
    }
    set_pair(raw_source, pair, param);
#pragma unroll
    for (int k = 0; k < Types::kStates; ++k) set_pair(raw_state[k], pair, state[k]);
  }

  put<kAligned>(chunk, kSource, index, raw_source);
  if constexpr (Types::kMaster) {
    RawVec<typename Types::Param, kVec> raw_param;
#pragma unroll
    for (int pair = 0; pair < kVec / 2; ++pair) {
      T param[2];
      get_pair(raw_source, pair, param);
      set_pair(raw_param, pair, param);
    }
    put<kAligned>(chunk, Types::kParamStream, index, raw_param);
  }
#pragma unroll
  for (int k = 0; k < Types::kStates; ++k) {
    if (!Types::kStatesMoved && chunk.uses_state[k]) {
      put<kAligned>(chunk, kState + k, index, raw_state[k]);
    }
  }
}

/// Element `index` by itself, in front of or behind the vectors.
template <class Types>
__device__ __forceinline__ void update_single(const UpdateChunk<Types>& chunk,
                                              std::uint32_t index) {
  using T = typename Types::Compute;
  using Source = typename Types::Source;
  using State = typename Types::State;
  constexpr int kState = Types::kStateStream;
  T param = load_element<Source>(chunk.streams[Types::kSourceStream], index);
  T grad = T(0);
  if constexpr (!Types::kStatesMoved) {
    grad = load_element<typename Types::Grad>(chunk.streams[Types::kGradStream], index) *
           chunk.grad_coef;
  }
  T state[Types::kStates];
#pragma unroll
  for (int k = 0; k < Types::kStates; ++k) {
    state[k] = T(0);
    if (chunk.uses_state[k]) state[k] = load_element<State>(chunk.streams[kState + k], index);
  }
  Types::Functor::update(param, grad, state, *chunk.coefs);
  store_element<typename Types::Param>(chunk.streams[Types::kParamStream], index, param);
  if constexpr (Types::kMaster) {
    store_element<Source>(chunk.streams[Types::kSourceStream], index, param);
  }
  if constexpr (!Types::kStatesMoved) {
#pragma unroll
    for (int k = 0; k < Types::kStates; ++k) {
      if (chunk.uses_state[k]) store_element<State>(chunk.streams[kState + k], index, state[k]);
    }
    if (chunk.write_back_grads) {
      store_element<typename Types::Grad>(chunk.streams[Types::kGradStream], index, grad);
    }
  }
}

/// The calling thread's share of a chunk. See Note [Peeling]. The single elements come first:
/// behind the loop they would keep its base addresses alive through it.
template <class Types, bool kAligned>
__device__ __forceinline__ void update_chunk(const UpdateChunk<Types>& chunk, const RowShare& share,
                                             std::uint32_t wanted_head) {
  constexpr std::uint32_t kVec = Types::kVec;
  const std::uint32_t head = wanted_head < share.count ? wanted_head : share.count;
  const std::uint32_t behind = share.count - (share.count - head) % kVec;
  const std::uint32_t singles = head + (share.count - behind);
  if (share.rank < singles) {
    update_single(chunk, share.rank < head ? share.rank : behind + (share.rank - head));
  }
#pragma unroll 1
  for (std::uint32_t i = share.rank; head + i * kVec < behind; i += share.size) {
    update_vector<Types, kAligned>(chunk, head + i * kVec);
  }
}

template <class Types>
struct UpdateShared {
  typename Types::Coefs coefs[kWarps];  ///< by team
};

// A block handles one chunk of a parameter, a warp one small parameter. Bytes per element: the sum
// of the streams, read once (and, but for the gradient, written once): fp32 Adam 16 + 12. One
// thread of each team computes what its elements share, in fp64. 16-byte accesses for every stream,
// whatever its type; misaligned streams as in Note [Peeling], in a kernel of their own so that the
// common one keeps its registers.
template <class Types, bool kAligned>
__global__ void __launch_bounds__(kThreads, kAligned ? Types::kBlocksPerSm : 1)
    fused_update_kernel(const UpdateLaunch<Types> __grid_constant__ launch) {
  using Functor = typename Types::Functor;
  using T = typename Types::Compute;
  if (launch.scalars->skip != 0.0f) return;
  UpdateShared<Types>& shared = block_shared<UpdateShared<Types>>();
  const RowShare share = row_share(launch.table);
  if (share.row >= 0 && share.rank == 0) {
    const auto& row = launch.table.rows[share.row];
    const typename Types::Params& params = launch.groups[launch.group[share.row]];
    auto coefs = Functor::template prepare<T>(params, static_cast<double>(*row.step));
    if constexpr (Layerwise<Functor>) Functor::apply_norms(params, row.norms, coefs);
    shared.coefs[share.team] = coefs;
  }
  __syncthreads();
  if (share.row < 0) return;

  const auto& row = launch.table.rows[share.row];
  const typename Types::Params& params = launch.groups[launch.group[share.row]];
  UpdateChunk<Types> chunk;
#pragma unroll
  for (int s = 0; s < Types::kStreams; ++s) {
    chunk.streams[s] = static_cast<unsigned char*>(row.streams[s]) +
                       share.begin * static_cast<std::int64_t>(Types::element_size(s));
  }
#pragma unroll
  for (int k = 0; k < Types::kStates; ++k) {
    chunk.uses_state[k] = Functor::uses_state(params, k);
  }
  chunk.write_back_grads = launch.write_back_grads;
  chunk.grad_coef = round_to<T>(launch.scalars->grad_coef);
  chunk.coefs = &shared.coefs[share.team];
  update_chunk<Types, kAligned>(chunk, share, launch.head[share.row]);
}

}  // namespace torchfuse::kernels::cuda
