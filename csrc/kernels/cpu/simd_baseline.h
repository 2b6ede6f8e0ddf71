// SPDX-License-Identifier: BSD-3-Clause
// Baseline level with one-lane vectors, in scalar instructions. Include simd.h.
#pragma once

#include <cstdint>

#include "kernels/cpu/level.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

using VecF = float;
using VecD = double;
TORCHFUSE_INLINE float load_f32(const float* p) { return *p; }
TORCHFUSE_INLINE void store_f32(float* p, float x) { *p = x; }
TORCHFUSE_INLINE double load_f64(const double* p) { return *p; }
TORCHFUSE_INLINE void store_f64(double* p, double x) { *p = x; }
TORCHFUSE_INLINE float load_bf16(const BFloat16* p) { return to_float(*p); }
TORCHFUSE_INLINE void store_bf16(BFloat16* p, float x) { *p = to_bfloat16(x); }
TORCHFUSE_INLINE float load_split(const BFloat16* param, const std::int16_t* remainder) {
  return bits_to_float(join_master({param->bits, static_cast<std::uint16_t>(*remainder)}));
}
TORCHFUSE_INLINE void store_split(BFloat16* param, std::int16_t* remainder, float x) {
  const SplitMaster halves = split_master(float_bits(x));
  param->bits = halves.param;
  *remainder = static_cast<std::int16_t>(halves.remainder);
}
TORCHFUSE_INLINE float load_f16(const Half* p) { return to_float(*p); }
TORCHFUSE_INLINE void store_f16(Half* p, float x) { *p = to_half(x); }

template <class T>
TORCHFUSE_INLINE bool reaches(T x, T threshold) {
  return !(magnitude(x) < threshold);
}
/// Returns +0 rather than -0, like the levels that clear the sign bit.
template <class T>
TORCHFUSE_INLINE T larger_magnitude(T a, T b) {
  return kernels::max(magnitude(a), magnitude(b)) + T(0);
}

TORCHFUSE_INLINE void store_stochastic(BFloat16* p, VecF x, RoundingKey key,
                                       std::uint64_t element) {
  *p = round_stochastically(x, random_16(key, element));
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
