// SPDX-License-Identifier: BSD-3-Clause
// Vectors of operands whose storage type is looked up. See Note [Mixed storage] in
// looked_up_access.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/float16.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/vec.cuh"

namespace torchfuse::kernels::cuda {

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

/// Like with_type(), for code that handles both 16-bit types in the same way.
template <class Run>
__device__ __forceinline__ void with_width(DType dtype, Run run) {
  if (dtype == DType::kFloat32) {
    run(float{});
  } else {
    run(Half{});
  }
}

/// Eight elements. After a load, the words contain the stored bits (all words for fp32, half of the
/// words for 16-bit types). After `set`, the words contain fp32 bits, which are converted by the
/// store.
struct LookedUpVec {
  static constexpr int kElements = 8;
  std::uint32_t words[kElements];
};

template <bool kAligned>
__device__ __forceinline__ void load_as(DType dtype, const unsigned char* operand,
                                        std::uint32_t index, LookedUpVec& raw) {
  with_width(dtype, [&](auto element) {
    using S = decltype(element);
    RawVec<S, LookedUpVec::kElements> typed;
    const unsigned char* address = operand + byte_offset<S>(index);
    load_vec<Keep::kStream>(typed, address, access_width<kAligned>(address));
#pragma unroll
    for (int i = 0; i < typed.kWords; ++i) raw.words[i] = typed.words[i];
  });
}

template <bool kAligned>
__device__ __forceinline__ void store_as(DType dtype, unsigned char* operand, std::uint32_t index,
                                         const LookedUpVec& raw) {
  with_type(dtype, [&](auto element) {
    using S = decltype(element);
    RawVec<S, LookedUpVec::kElements> typed;
#pragma unroll
    for (int pair = 0; pair < LookedUpVec::kElements / 2; ++pair) {
      const float two[2] = {bits_to_float(raw.words[2 * pair]),
                            bits_to_float(raw.words[2 * pair + 1])};
      set_pair(typed, pair, two);
    }
    unsigned char* address = operand + byte_offset<S>(index);
    store_vec<Keep::kStream>(address, typed, access_width<kAligned>(address));
  });
}

template <bool kAligned>
__device__ __forceinline__ void store_16(unsigned char* operand, std::uint32_t index,
                                         const RawVec<BFloat16, LookedUpVec::kElements>& raw) {
  unsigned char* address = operand + byte_offset<BFloat16>(index);
  store_vec<Keep::kStream>(address, raw, access_width<kAligned>(address));
}

__device__ __forceinline__ void get_as(DType dtype, const LookedUpVec& raw,
                                       float (&values)[LookedUpVec::kElements]) {
  with_type(dtype, [&](auto element) {
    using S = decltype(element);
    RawVec<S, LookedUpVec::kElements> typed;
#pragma unroll
    for (int i = 0; i < typed.kWords; ++i) typed.words[i] = raw.words[i];
    get_values(typed, 0, values);
  });
}

}  // namespace torchfuse::kernels::cuda
