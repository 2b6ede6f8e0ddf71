// SPDX-License-Identifier: BSD-3-Clause
// The part of the toolkit's <cuda_bf16.h> that kernels use. Rounding compares distances instead of
// adding to the bits as kernels/common/float16.h does, so that comparing results checks both.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  std::uint16_t bits;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  if (std::isnan(value)) return {0x7fff};
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const std::uint16_t toward_zero = static_cast<std::uint16_t>(bits >> 16);
  if (std::isinf(value)) return {toward_zero};
  const std::uint16_t away = static_cast<std::uint16_t>(toward_zero + 1);
  // Distances in units of the last place of a float: all bits below the kept ones count.
  const std::uint32_t below = bits - (static_cast<std::uint32_t>(toward_zero) << 16);
  const std::uint32_t above = 0x10000u - below;
  if (below != above) return {below < above ? toward_zero : away};
  return {toward_zero % 2 == 0 ? toward_zero : away};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
}
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {bits}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
