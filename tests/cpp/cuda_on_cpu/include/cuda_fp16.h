// SPDX-License-Identifier: BSD-3-Clause
// The part of the toolkit's <cuda_fp16.h> that kernels use, by the compiler's own _Float16: not by
// the integer routines of kernels/common/float16.h, so that comparing results checks both.
#pragma once

#include <cstring>

struct __half {
  _Float16 value;
};
struct __half2 {
  __half x, y;
};

inline __half __float2half_rn(float value) { return {static_cast<_Float16>(value)}; }
inline float __half2float(__half value) { return static_cast<float>(value.value); }
inline __half2 __floats2half2_rn(float low, float high) {
  return {__float2half_rn(low), __float2half_rn(high)};
}
inline __half __ushort_as_half(unsigned short bits) {
  __half value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned short __half_as_ushort(__half value) {
  unsigned short bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
