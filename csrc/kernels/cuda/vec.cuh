// SPDX-License-Identifier: BSD-3-Clause
// Vectors of storage elements. Raw bits are loaded first and converted later, so that the loads of
// all operands are in flight together. Conversions equal common/float16.h except for NaN payloads.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "kernels/common/dtype.h"
#include "kernels/common/float16.h"
#include "kernels/cuda/alignment.h"

namespace torchfuse::kernels::cuda {

/// Cache hint. kStream is for operands larger than the caches.
enum class Keep { kNormal, kStream };

/// kVec elements of storage type S, as stored in memory.
template <class S, int kVec>
struct RawVec {
  static constexpr int kWords = kVec * static_cast<int>(sizeof(S)) / 4;
  static_assert(kWords % 4 == 0, "vectors are multiples of 16 bytes");
  std::uint32_t words[kWords];
};

/// Loads a T with one access.
template <class T, Keep kKeep>
__device__ __forceinline__ T load_once(const unsigned char* address) {
  const T* typed = reinterpret_cast<const T*>(address);
  return kKeep == Keep::kStream ? __ldcs(typed) : *typed;
}

template <Keep kKeep, class T>
__device__ __forceinline__ void store_once(unsigned char* address, T value) {
  T* typed = reinterpret_cast<T*>(address);
  if constexpr (kKeep == Keep::kStream) {
    __stcs(typed, value);
  } else {
    *typed = value;
  }
}

template <std::uint32_t kWidth, Keep kKeep, int kWords>
__device__ __forceinline__ void load_words(const unsigned char* address,
                                           std::uint32_t (&words)[kWords]) {
  if constexpr (kWidth == 16) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 four = load_once<uint4, kKeep>(address + 4 * i);
      words[i] = four.x;
      words[i + 1] = four.y;
      words[i + 2] = four.z;
      words[i + 3] = four.w;
    }
  } else if constexpr (kWidth == 8) {
#pragma unroll
    for (int i = 0; i < kWords; i += 2) {
      const uint2 two = load_once<uint2, kKeep>(address + 4 * i);
      words[i] = two.x;
      words[i + 1] = two.y;
    }
  } else if constexpr (kWidth == 4) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = load_once<unsigned, kKeep>(address + 4 * i);
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const std::uint32_t low = load_once<unsigned short, kKeep>(address + 4 * i);
      const std::uint32_t high = load_once<unsigned short, kKeep>(address + 4 * i + 2);
      words[i] = low | (high << 16);
    }
  }
}

template <std::uint32_t kWidth, Keep kKeep, int kWords>
__device__ __forceinline__ void store_words(unsigned char* address,
                                            const std::uint32_t (&words)[kWords]) {
  if constexpr (kWidth == 16) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      store_once<kKeep>(address + 4 * i,
                        make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]));
    }
  } else if constexpr (kWidth == 8) {
#pragma unroll
    for (int i = 0; i < kWords; i += 2) {
      store_once<kKeep>(address + 4 * i, make_uint2(words[i], words[i + 1]));
    }
  } else if constexpr (kWidth == 4) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) store_once<kKeep, unsigned>(address + 4 * i, words[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      store_once<kKeep>(address + 4 * i, static_cast<unsigned short>(words[i] & 0xffffu));
      store_once<kKeep>(address + 4 * i + 2, static_cast<unsigned short>(words[i] >> 16));
    }
  }
}

/// Returns the access width at `address`. For misaligned operands, the width is computed for every
/// vector: three instructions, while a width kept during the loop would cost a register per
/// operand.
template <bool kAligned>
__device__ __forceinline__ std::uint32_t access_width(const unsigned char* address) {
  return kAligned ? kVectorBytes : legal_width(reinterpret_cast<std::uintptr_t>(address));
}

/// Returns an element's byte offset. Within a chunk, 32 bits are enough.
template <class S>
__device__ __forceinline__ std::uint32_t byte_offset(std::uint32_t index) {
  return index * static_cast<std::uint32_t>(sizeof(S));
}

/// Loads a vector with accesses of `width` bytes, from sizeof(S) to 16. `width` is the same for all
/// threads of a warp.
template <Keep kKeep, class S, int kVec>
__device__ __forceinline__ void load_vec(RawVec<S, kVec>& raw, const unsigned char* address,
                                         std::uint32_t width) {
  if (width == 16) {
    load_words<16, kKeep>(address, raw.words);
  } else if (width == 8) {
    load_words<8, kKeep>(address, raw.words);
  } else if constexpr (sizeof(S) <= 4) {
    if (sizeof(S) == 4 || width == 4) {
      load_words<4, kKeep>(address, raw.words);
    } else {
      load_words<2, kKeep>(address, raw.words);
    }
  }
}

template <Keep kKeep, class S, int kVec>
__device__ __forceinline__ void store_vec(unsigned char* address, const RawVec<S, kVec>& raw,
                                          std::uint32_t width) {
  if (width == 16) {
    store_words<16, kKeep>(address, raw.words);
  } else if (width == 8) {
    store_words<8, kKeep>(address, raw.words);
  } else if constexpr (sizeof(S) <= 4) {
    if (sizeof(S) == 4 || width == 4) {
      store_words<4, kKeep>(address, raw.words);
    } else {
      store_words<2, kKeep>(address, raw.words);
    }
  }
}

/// Asks for the memory at `address`, so that a later load finds it in the L2 cache.
#if defined(__CUDACC__)
__device__ __forceinline__ void prefetch(const unsigned char* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)));
}
#else
void prefetch(const unsigned char* address);  // defined by the code that runs kernels on a CPU
#endif

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ double widen(double value) { return value; }
__device__ __forceinline__ float widen(BFloat16 value) { return to_float(value); }
__device__ __forceinline__ float widen(Half value) {
  return __half2float(__ushort_as_half(value.bits));
}

__device__ __forceinline__ void narrow(float value, float& stored) { stored = value; }
__device__ __forceinline__ void narrow(double value, double& stored) { stored = value; }
__device__ __forceinline__ void narrow(float value, BFloat16& stored) {
  stored.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
__device__ __forceinline__ void narrow(float value, Half& stored) {
  stored.bits = __half_as_ushort(__float2half_rn(value));
}

/// Returns two 16-bit elements as one word, the first in the low half, with one instruction.
__device__ __forceinline__ std::uint32_t narrow_pair(float first, float second, BFloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  std::uint32_t word;
  memcpy(&word, &pair, sizeof word);
  return word;
}

__device__ __forceinline__ std::uint32_t narrow_pair(float first, float second, Half) {
  const __half2 pair = __floats2half2_rn(first, second);
  std::uint32_t word;
  memcpy(&word, &pair, sizeof word);
  return word;
}

/// Converts elements 2 * pair and 2 * pair + 1 of a vector. Vectors are processed pair by pair, in
/// place, so that few converted values are alive at a time.
template <class T, class S, int kVec>
__device__ __forceinline__ void get_pair(const RawVec<S, kVec>& raw, int pair, T (&values)[2]) {
  if constexpr (sizeof(S) == 2) {
    const std::uint32_t word = raw.words[pair];
    values[0] = widen(S{static_cast<std::uint16_t>(word & 0xffffu)});
    values[1] = widen(S{static_cast<std::uint16_t>(word >> 16)});
  } else {
    static_assert(sizeof(T) == sizeof(S));
    memcpy(values, &raw.words[pair * static_cast<int>(sizeof values / 4)], sizeof values);
  }
}

template <class T, class S, int kVec>
__device__ __forceinline__ void set_pair(RawVec<S, kVec>& raw, int pair, const T (&values)[2]) {
  if constexpr (sizeof(S) == 2) {
    raw.words[pair] = narrow_pair(values[0], values[1], S{});
  } else {
    static_assert(sizeof(T) == sizeof(S));
    memcpy(&raw.words[pair * static_cast<int>(sizeof values / 4)], values, sizeof values);
  }
}

/// Converts the `kCount` elements of a vector from element `first` on. Both numbers are even.
template <class T, class S, int kVec, int kCount>
__device__ __forceinline__ void get_values(const RawVec<S, kVec>& raw, int first,
                                           T (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    T two[2];
    get_pair(raw, (first + i) / 2, two);
    values[i] = two[0];
    values[i + 1] = two[1];
  }
}

template <class T, class S, int kVec, int kCount>
__device__ __forceinline__ void set_values(RawVec<S, kVec>& raw, int first,
                                           const T (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const T two[2] = {values[i], values[i + 1]};
    set_pair(raw, (first + i) / 2, two);
  }
}

/// Loads element `index` of an operand.
template <class S>
__device__ __forceinline__ auto load_element(const unsigned char* operand, std::uint32_t index) {
  return widen(reinterpret_cast<const S*>(operand)[index]);
}

template <class S, class T>
__device__ __forceinline__ void store_element(unsigned char* operand, std::uint32_t index,
                                              T value) {
  narrow(value, reinterpret_cast<S*>(operand)[index]);
}

}  // namespace torchfuse::kernels::cuda
