// SPDX-License-Identifier: BSD-3-Clause
// The update kernel that looks storage types up as it runs: see Note [Mixed storage].
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

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

/// The vector that begins at element `index`.
template <class Functor, bool kAligned>
__device__ __forceinline__ void update_mixed_vector(const MixedChunk<Functor>& chunk,
                                                    std::uint32_t index) {
  using Types = MixedTypes<Functor>;
  constexpr int kVec = MixedVec::kElements;
  constexpr int kParam = Types::kParamStream;
  constexpr int kGrad = Types::kGradStream;
  constexpr int kState = Types::kStateStream;
  constexpr int kMaster = Types::kMasterStream;
  const bool has_master = chunk.storage->has_master();
  MixedVec raw_source;
  MixedVec raw_grad;
  MixedVec raw_state[Types::kStates] = {};
  if (has_master) {
    load_mixed<kAligned>(raw_source, chunk.streams[kMaster], index, DType::kFloat32);
  } else {
    load_mixed<kAligned>(raw_source, chunk.streams[kParam], index, chunk.dtype(kParam));
  }
  load_mixed<kAligned>(raw_grad, chunk.streams[kGrad], index, chunk.dtype(kGrad));
#pragma unroll
  for (int k = 0; k < Types::kStates; ++k) {
    if (!chunk.uses_state[k]) continue;
    load_mixed<kAligned>(raw_state[k], chunk.streams[kState + k], index, chunk.dtype(kState + k));
  }

  float param[kVec];
  float grad[kVec];
  float state[Types::kStates][kVec];
  widen_mixed(raw_source, has_master ? DType::kFloat32 : chunk.dtype(kParam), param);
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

  if (has_master) store_mixed<kAligned>(chunk.streams[kMaster], index, DType::kFloat32, param);
  store_mixed<kAligned>(chunk.streams[kParam], index, chunk.dtype(kParam), param);
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

/// Element `index` by itself, in front of or behind the vectors.
template <class Functor>
__device__ __forceinline__ void update_mixed_single(const MixedChunk<Functor>& chunk,
                                                    std::uint32_t index) {
  using Types = MixedTypes<Functor>;
  constexpr int kParam = Types::kParamStream;
  constexpr int kGrad = Types::kGradStream;
  constexpr int kState = Types::kStateStream;
  constexpr int kMaster = Types::kMasterStream;
  const bool has_master = chunk.storage->has_master();
  float param = has_master ? load_mixed_element(chunk.streams[kMaster], index, DType::kFloat32)
                           : load_mixed_element(chunk.streams[kParam], index, chunk.dtype(kParam));
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
  if (has_master) store_mixed_element(chunk.streams[kMaster], index, DType::kFloat32, param);
  store_mixed_element(chunk.streams[kParam], index, chunk.dtype(kParam), param);
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
