// SPDX-License-Identifier: BSD-3-Clause
// The update kernel that looks storage types up as it runs: see Note [Mixed storage].
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/param_remainder.h"
#include "kernels/cuda/fused_update_kernel.cuh"
#include "kernels/cuda/mixed_types.cuh"

namespace torchfuse::kernels::cuda {

/// A vector of a stream as it lies in memory: all words if it is fp32, half of them otherwise.
struct MixedVec {
  static constexpr int kElements = 8;
  std::uint32_t words[kElements];
};

/// Calls run(S{}) for the storage type.
template <class Run>
__device__ __forceinline__ void with_type(DType dtype, Run run) {
  if (dtype == DType::kFloat32) {
    run(float{});
  } else if (dtype == DType::kBFloat16) {
    run(BFloat16{});
  } else {
    run(Half{});
  }
}

/// The vector that begins at element `index`. Nothing looks at the words before widen_mixed, so
/// that the loads of all streams are in flight together.
template <bool kAligned>
__device__ __forceinline__ void load_mixed(MixedVec& raw, const unsigned char* stream,
                                           std::uint32_t index, DType dtype) {
  const auto load = [&](auto element) {
    using S = decltype(element);
    RawVec<S, MixedVec::kElements> typed;
    const unsigned char* address = stream + byte_offset<S>(index);
    load_vec<Keep::kStream>(typed, address, access_width<kAligned>(address));
#pragma unroll
    for (int i = 0; i < typed.kWords; ++i) raw.words[i] = typed.words[i];
  };
  if (dtype == DType::kFloat32) {
    load(float{});
  } else {
    load(Half{});
  }
}

__device__ __forceinline__ void widen_mixed(const MixedVec& raw, DType dtype,
                                            float (&values)[MixedVec::kElements]) {
  with_type(dtype, [&](auto element) {
    using S = decltype(element);
    RawVec<S, MixedVec::kElements> typed;
#pragma unroll
    for (int i = 0; i < typed.kWords; ++i) typed.words[i] = raw.words[i];
#pragma unroll
    for (int pair = 0; pair < MixedVec::kElements / 2; ++pair) {
      float two[2];
      get_pair(typed, pair, two);
      values[2 * pair] = two[0];
      values[2 * pair + 1] = two[1];
    }
  });
}

template <bool kAligned>
__device__ __forceinline__ void store_mixed(unsigned char* stream, std::uint32_t index, DType dtype,
                                            const float (&values)[MixedVec::kElements]) {
  with_type(dtype, [&](auto element) {
    using S = decltype(element);
    RawVec<S, MixedVec::kElements> typed;
#pragma unroll
    for (int pair = 0; pair < MixedVec::kElements / 2; ++pair) {
      const float two[2] = {values[2 * pair], values[2 * pair + 1]};
      set_pair(typed, pair, two);
    }
    unsigned char* address = stream + byte_offset<S>(index);
    store_vec<Keep::kStream>(address, typed, access_width<kAligned>(address));
  });
}

/// A vector of masters kept as parameters and remainders: the former's words, then the latter's.
__device__ __forceinline__ void join_mixed(const MixedVec& raw,
                                           float (&values)[MixedVec::kElements]) {
  constexpr int kHalf = MixedVec::kElements / 2;
#pragma unroll
  for (int i = 0; i < MixedVec::kElements; ++i) {
    const int shift = 16 * (i % 2);
    values[i] =
        bits_to_float(join_master({static_cast<std::uint16_t>(raw.words[i / 2] >> shift),
                                   static_cast<std::uint16_t>(raw.words[kHalf + i / 2] >> shift)}));
  }
}

__device__ __forceinline__ void split_mixed(const float (&values)[MixedVec::kElements],
                                            RawVec<BFloat16, MixedVec::kElements>& params,
                                            RawVec<BFloat16, MixedVec::kElements>& remainders) {
#pragma unroll
  for (int i = 0; i < MixedVec::kElements; i += 2) {
    const SplitMaster first = split_master(float_bits(values[i]));
    const SplitMaster second = split_master(float_bits(values[i + 1]));
    params.words[i / 2] = first.param | static_cast<std::uint32_t>(second.param) << 16;
    remainders.words[i / 2] = first.remainder | static_cast<std::uint32_t>(second.remainder) << 16;
  }
}

/// What the elements of one chunk share. Streams point to the chunk's first element.
template <class Functor>
struct MixedChunk {
  using Types = MixedTypes<Functor>;
  unsigned char* streams[Types::kStreams];
  bool uses_state[Types::kStates];
  bool write_back_grads;
  float grad_coef;
  const typename Types::Coefs* coefs;      ///< in shared memory
  const typename Types::Storage* storage;  ///< in the kernel's arguments

  __device__ DType dtype(int stream) const { return storage->dtypes[stream]; }
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
  MixedVec raw_grad;
  MixedVec raw_state[Types::kStates] = {};
  load_source<kAligned>(chunk, index, raw_source);
  load_mixed<kAligned>(raw_grad, chunk.streams[kGrad], index, chunk.dtype(kGrad));
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
  if (chunk.write_back_grads) {
    store_mixed<kAligned>(chunk.streams[kGrad], index, chunk.dtype(kGrad), grad);
  }
#pragma unroll
  for (int k = 0; k < Types::kStates; ++k) {
    if (!chunk.uses_state[k]) continue;
    store_mixed<kAligned>(chunk.streams[kState + k], index, chunk.dtype(kState + k), state[k]);
  }
}

__device__ __forceinline__ float load_mixed_element(const unsigned char* stream,
                                                    std::uint32_t index, DType dtype) {
  float value = 0.0f;
  with_type(dtype, [&](auto element) { value = load_element<decltype(element)>(stream, index); });
  return value;
}

__device__ __forceinline__ void store_mixed_element(unsigned char* stream, std::uint32_t index,
                                                    DType dtype, float value) {
  with_type(dtype, [&](auto element) { store_element<decltype(element)>(stream, index, value); });
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
  const float grad =
      load_mixed_element(chunk.streams[kGrad], index, chunk.dtype(kGrad)) * chunk.grad_coef;
  float state[Types::kStates];
#pragma unroll
  for (int k = 0; k < Types::kStates; ++k) {
    state[k] = 0.0f;
    if (!chunk.uses_state[k]) continue;
    state[k] = load_mixed_element(chunk.streams[kState + k], index, chunk.dtype(kState + k));
  }
  Functor::update(param, grad, state, *chunk.coefs);
  store_source_element(chunk, index, param);
  if (chunk.write_back_grads) {
    store_mixed_element(chunk.streams[kGrad], index, chunk.dtype(kGrad), grad);
  }
#pragma unroll
  for (int k = 0; k < Types::kStates; ++k) {
    if (!chunk.uses_state[k]) continue;
    store_mixed_element(chunk.streams[kState + k], index, chunk.dtype(kState + k), state[k]);
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

// Work, chunks, peeling and bytes per element as in fused_update_kernel.
template <class Functor, bool kAligned>
__global__ void __launch_bounds__(kThreads, kAligned ? MixedTypes<Functor>::kBlocksPerSm : 1)
    fused_update_mixed_kernel(const __grid_constant__ UpdateLaunch<MixedTypes<Functor>> launch) {
  using Types = MixedTypes<Functor>;
  if (launch.scalars->skip != 0.0f) return;
  UpdateShared<Types>& shared = block_shared<UpdateShared<Types>>();
  const RowShare share = row_share(launch.table);
  if (share.row >= 0 && share.rank == 0) {
    shared.coefs[share.team] =
        Functor::template prepare<float>(launch.groups[launch.group[share.row]],
                                         static_cast<double>(*launch.table.rows[share.row].step));
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
  chunk.grad_coef = static_cast<float>(launch.scalars->grad_coef);
  chunk.coefs = &shared.coefs[share.team];
  chunk.storage = &launch;
  update_mixed_chunk<Functor, kAligned>(chunk, share, launch.head[share.row]);
}

}  // namespace torchfuse::kernels::cuda
