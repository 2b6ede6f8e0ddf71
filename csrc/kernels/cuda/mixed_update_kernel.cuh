// SPDX-License-Identifier: BSD-3-Clause
// The update kernel that looks storage types up as it runs: see Note [Mixed storage].
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/math.h"
#include "kernels/common/param_remainder.h"
#include "kernels/common/stochastic_rounding.h"
#include "kernels/cuda/fused_update_kernel.cuh"
#include "kernels/cuda/mixed_types.cuh"
#include "kernels/cuda/mixed_vec.cuh"

namespace torchfuse::kernels::cuda {

/// What the elements of one chunk share. Streams point to the chunk's first element.
template <class Functor>
struct MixedChunk {
  using Types = MixedTypes<Functor>;
  unsigned char* streams[Types::kStreams];
  bool uses_state[Types::kStates];
  bool write_back_grads;
  float grad_coef;
  std::int64_t first;                      ///< element of the parameter at which the chunk begins
  RoundingKey rounding;                    ///< for stochastic rounding only
  const typename Types::Coefs* coefs;      ///< in shared memory
  const typename Types::Storage* storage;  ///< in the kernel's arguments

  __device__ DType dtype(int stream) const { return storage->dtypes[stream]; }

  __device__ BFloat16 round(float value, std::uint32_t index) const {
    return round_stochastically(value,
                                random_16(rounding, static_cast<std::uint64_t>(first + index)));
  }
};

/// The words of what is updated: the master, wherever it is kept, or the parameter.
template <bool kAligned, class Functor>
__device__ __forceinline__ void load_source(const MixedChunk<Functor>& chunk, std::uint32_t index,
                                            MixedVec& raw) {
  using Types = MixedTypes<Functor>;
  constexpr int kParam = Types::kParamStream;
  if (chunk.storage->has_master()) {
    load_mixed<kAligned>(raw, chunk.streams[Types::kMasterStream], index, DType::kFloat32);
    return;
  }
  load_mixed<kAligned>(raw, chunk.streams[kParam], index, chunk.dtype(kParam));
  if (chunk.storage->has_remainder()) {
    RawVec<BFloat16, Types::kVec> remainders;
    const unsigned char* address =
        chunk.streams[Types::kMasterStream] + byte_offset<BFloat16>(index);
    load_vec<Keep::kStream>(remainders, address, access_width<kAligned>(address));
#pragma unroll
    for (int i = 0; i < remainders.kWords; ++i)
      raw.words[remainders.kWords + i] = remainders.words[i];
  }
}

template <class Functor>
__device__ __forceinline__ void widen_source(const MixedChunk<Functor>& chunk, const MixedVec& raw,
                                             float (&values)[MixedVec::kElements]) {
  if (chunk.storage->has_remainder()) {
    join_mixed(raw, values);
  } else {
    const DType param = chunk.dtype(MixedTypes<Functor>::kParamStream);
    widen_mixed(raw, chunk.storage->has_master() ? DType::kFloat32 : param, values);
  }
}

/// The new values to wherever they are kept.
template <bool kAligned, class Functor>
__device__ __forceinline__ void store_source(const MixedChunk<Functor>& chunk, std::uint32_t index,
                                             const float (&values)[MixedVec::kElements]) {
  using Types = MixedTypes<Functor>;
  constexpr int kParam = Types::kParamStream;
  unsigned char* master = chunk.streams[Types::kMasterStream];
  if (chunk.storage->has_remainder()) {
    RawVec<BFloat16, Types::kVec> params;
    RawVec<BFloat16, Types::kVec> remainders;
    split_mixed(values, params, remainders);
    unsigned char* address = chunk.streams[kParam] + byte_offset<BFloat16>(index);
    store_vec<Keep::kStream>(address, params, access_width<kAligned>(address));
    address = master + byte_offset<BFloat16>(index);
    store_vec<Keep::kStream>(address, remainders, access_width<kAligned>(address));
    return;
  }
  if (chunk.storage->stochastic) {
    RawVec<BFloat16, Types::kVec> params;
#pragma unroll
    for (int i = 0; i < Types::kVec; i += 2) {
      const std::uint32_t first = chunk.round(values[i], index + i).bits;
      const std::uint32_t second = chunk.round(values[i + 1], index + i + 1).bits;
      params.words[i / 2] = first | second << 16;
    }
    unsigned char* address = chunk.streams[kParam] + byte_offset<BFloat16>(index);
    store_vec<Keep::kStream>(address, params, access_width<kAligned>(address));
    return;
  }
  if (chunk.storage->has_master()) {
    store_mixed<kAligned>(master, index, DType::kFloat32, values);
  }
  store_mixed<kAligned>(chunk.streams[kParam], index, chunk.dtype(kParam), values);
}

/// The vector that begins at element `index`.
template <class Functor, bool kAligned>
__device__ __forceinline__ void update_mixed_vector(const MixedChunk<Functor>& chunk,
                                                    std::uint32_t index) {
  using Types = MixedTypes<Functor>;
  constexpr int kVec = MixedVec::kElements;
  constexpr int kGrad = Types::kGradStream;
  constexpr int kState = Types::kStateStream;
  MixedVec raw_source;
  MixedVec raw_grad = {};
  MixedVec raw_state[Types::kStates] = {};
  load_source<kAligned>(chunk, index, raw_source);
  if constexpr (!Types::kStatesMoved) {
    load_mixed<kAligned>(raw_grad, chunk.streams[kGrad], index, chunk.dtype(kGrad));
  }
#pragma unroll
  for (int k = 0; k < Types::kStates; ++k) {
    if (!chunk.uses_state[k]) continue;
    load_mixed<kAligned>(raw_state[k], chunk.streams[kState + k], index, chunk.dtype(kState + k));
  }

  float param[kVec];
  float grad[kVec];
  float state[Types::kStates][kVec];
  widen_source(chunk, raw_source, param);
  widen_mixed(raw_grad, chunk.dtype(kGrad), grad);
#pragma unroll
  for (int k = 0; k < Types::kStates; ++k) {
    widen_mixed(raw_state[k], chunk.dtype(kState + k), state[k]);
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    float element_state[Types::kStates];
#pragma unroll
    for (int k = 0; k < Types::kStates; ++k) element_state[k] = state[k][i];
    grad[i] = grad[i] * chunk.grad_coef;
    Functor::update(param[i], grad[i], element_state, *chunk.coefs);
#pragma unroll
    for (int k = 0; k < Types::kStates; ++k) state[k][i] = element_state[k];
  }

  store_source<kAligned>(chunk, index, param);
  if constexpr (!Types::kStatesMoved) {
    if (chunk.write_back_grads) {
      store_mixed<kAligned>(chunk.streams[kGrad], index, chunk.dtype(kGrad), grad);
    }
#pragma unroll
    for (int k = 0; k < Types::kStates; ++k) {
      if (!chunk.uses_state[k]) continue;
      store_mixed<kAligned>(chunk.streams[kState + k], index, chunk.dtype(kState + k), state[k]);
    }
  }
}

/// As load_source and store_source, for one element.
template <class Functor>
__device__ __forceinline__ float load_source_element(const MixedChunk<Functor>& chunk,
                                                     std::uint32_t index) {
  using Types = MixedTypes<Functor>;
  constexpr int kParam = Types::kParamStream;
  const unsigned char* master = chunk.streams[Types::kMasterStream];
  if (chunk.storage->has_master()) return load_element<float>(master, index);
  if (chunk.storage->has_remainder()) {
    return bits_to_float(
        join_master({reinterpret_cast<const std::uint16_t*>(chunk.streams[kParam])[index],
                     reinterpret_cast<const std::uint16_t*>(master)[index]}));
  }
  return load_mixed_element(chunk.streams[kParam], index, chunk.dtype(kParam));
}

template <class Functor>
__device__ __forceinline__ void store_source_element(const MixedChunk<Functor>& chunk,
                                                     std::uint32_t index, float value) {
  using Types = MixedTypes<Functor>;
  constexpr int kParam = Types::kParamStream;
  unsigned char* master = chunk.streams[Types::kMasterStream];
  if (chunk.storage->has_remainder()) {
    const SplitMaster halves = split_master(float_bits(value));
    reinterpret_cast<std::uint16_t*>(chunk.streams[kParam])[index] = halves.param;
    reinterpret_cast<std::uint16_t*>(master)[index] = halves.remainder;
    return;
  }
  if (chunk.storage->stochastic) {
    reinterpret_cast<BFloat16*>(chunk.streams[kParam])[index] = chunk.round(value, index);
    return;
  }
  if (chunk.storage->has_master()) store_element<float>(master, index, value);
  store_mixed_element(chunk.streams[kParam], index, chunk.dtype(kParam), value);
}

/// Element `index` by itself, in front of or behind the vectors.
template <class Functor>
__device__ __forceinline__ void update_mixed_single(const MixedChunk<Functor>& chunk,
                                                    std::uint32_t index) {
  using Types = MixedTypes<Functor>;
  constexpr int kGrad = Types::kGradStream;
  constexpr int kState = Types::kStateStream;
  float param = load_source_element(chunk, index);
  float grad = 0.0f;
  if constexpr (!Types::kStatesMoved) {
    grad = load_mixed_element(chunk.streams[kGrad], index, chunk.dtype(kGrad)) * chunk.grad_coef;
  }
  float state[Types::kStates];
#pragma unroll
  for (int k = 0; k < Types::kStates; ++k) {
    state[k] = 0.0f;
    if (!chunk.uses_state[k]) continue;
    state[k] = load_mixed_element(chunk.streams[kState + k], index, chunk.dtype(kState + k));
  }
  Functor::update(param, grad, state, *chunk.coefs);
  store_source_element(chunk, index, param);
  if constexpr (!Types::kStatesMoved) {
    if (chunk.write_back_grads) {
      store_mixed_element(chunk.streams[kGrad], index, chunk.dtype(kGrad), grad);
    }
#pragma unroll
    for (int k = 0; k < Types::kStates; ++k) {
      if (!chunk.uses_state[k]) continue;
      store_mixed_element(chunk.streams[kState + k], index, chunk.dtype(kState + k), state[k]);
    }
  }
}

/// The calling thread's share of a chunk, as update_chunk.
template <class Functor, bool kAligned>
__device__ __forceinline__ void update_mixed_chunk(const MixedChunk<Functor>& chunk,
                                                   const RowShare& share,
                                                   std::uint32_t wanted_head) {
  constexpr std::uint32_t kVec = MixedTypes<Functor>::kVec;
  const std::uint32_t head = wanted_head < share.count ? wanted_head : share.count;
  const std::uint32_t behind = share.count - (share.count - head) % kVec;
  const std::uint32_t singles = head + (share.count - behind);
  if (share.rank < singles) {
    update_mixed_single(chunk, share.rank < head ? share.rank : behind + (share.rank - head));
  }
#pragma unroll 1
  for (std::uint32_t i = share.rank; head + i * kVec < behind; i += share.size) {
    update_mixed_vector<Functor, kAligned>(chunk, head + i * kVec);
  }
}

template <class Types>
struct MixedShared {
  typename Types::Coefs coefs[kWarps];  ///< by team
  RoundingKey rounding[kWarps];
};

// Work, chunks, peeling and bytes per element as in fused_update_kernel.
template <class Functor, bool kAligned>
__global__ void __launch_bounds__(kThreads, kAligned ? MixedTypes<Functor>::kBlocksPerSm : 1)
    fused_update_mixed_kernel(const UpdateLaunch<MixedTypes<Functor>> __grid_constant__ launch) {
  using Types = MixedTypes<Functor>;
  if (launch.scalars->skip != 0.0f) return;
  MixedShared<Types>& shared = block_shared<MixedShared<Types>>();
  const RowShare share = row_share(launch.table);
  if (share.row >= 0 && share.rank == 0) {
    const auto& row = launch.table.rows[share.row];
    const typename Types::Params& params = launch.groups[launch.group[share.row]];
    shared.rounding[share.team] = rounding_key(launch.seed, static_cast<std::uint64_t>(row.index),
                                               static_cast<std::uint64_t>(*row.step));
    auto coefs = Functor::template prepare<float>(params, static_cast<double>(*row.step));
    if constexpr (Layerwise<Functor>) Functor::apply_norms(params, row.norms, coefs);
    shared.coefs[share.team] = coefs;
  }
  __syncthreads();
  if (share.row < 0) return;

  const auto& row = launch.table.rows[share.row];
  const typename Types::Params& params = launch.groups[launch.group[share.row]];
  MixedChunk<Functor> chunk;
#pragma unroll
  for (int s = 0; s < Types::kStreams; ++s) {
    chunk.streams[s] = static_cast<unsigned char*>(row.streams[s]) +
                       share.begin * static_cast<std::int64_t>(launch.element_size(s));
  }
#pragma unroll
  for (int k = 0; k < Types::kStates; ++k) chunk.uses_state[k] = Functor::uses_state(params, k);
  chunk.write_back_grads = launch.write_back_grads;
  chunk.grad_coef = round_to<float>(launch.scalars->grad_coef);
  chunk.first = share.begin;
  chunk.rounding = shared.rounding[share.team];
  chunk.coefs = &shared.coefs[share.team];
  chunk.storage = &launch;
  update_mixed_chunk<Functor, kAligned>(chunk, share, launch.head[share.row]);
}

}  // namespace torchfuse::kernels::cuda
