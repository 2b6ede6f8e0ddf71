// SPDX-License-Identifier: BSD-3-Clause
// Vectors and elements of streams whose storage type is known at run time: see Note [Mixed
// storage].
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/float16.h"
#include "kernels/common/param_remainder.h"
#include "kernels/cuda/fused_update_kernel.cuh"
#include "kernels/cuda/vec.cuh"

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

}  // namespace torchfuse::kernels::cuda
