// SPDX-License-Identifier: BSD-3-Clause
// NEON level for aarch64, with 128-bit vectors. Include simd.h.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "kernels/cpu/level.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

struct VecF {
  float32x4_t v;
  VecF() = default;
  TORCHFUSE_INLINE explicit VecF(float x) : v(vdupq_n_f32(x)) {}
  TORCHFUSE_INLINE explicit VecF(float32x4_t x) : v(x) {}
};
struct VecD {
  float64x2_t v;
  VecD() = default;
  TORCHFUSE_INLINE explicit VecD(double x) : v(vdupq_n_f64(x)) {}
  TORCHFUSE_INLINE explicit VecD(float64x2_t x) : v(x) {}
};
#define TORCHFUSE_F(op) v##op##q_f32
#define TORCHFUSE_D(op) v##op##q_f64

TORCHFUSE_INLINE uint32x4_t bits_of(VecF x) { return vreinterpretq_u32_f32(x.v); }
TORCHFUSE_INLINE uint64x2_t bits_of(VecD x) { return vreinterpretq_u64_f64(x.v); }
TORCHFUSE_INLINE VecF from_bits(uint32x4_t bits) { return VecF(vreinterpretq_f32_u32(bits)); }
TORCHFUSE_INLINE VecD from_bits(uint64x2_t bits) { return VecD(vreinterpretq_f64_u64(bits)); }
TORCHFUSE_INLINE uint32x4_t magnitude_bits(VecF x) {
  return vandq_u32(bits_of(x), vdupq_n_u32(0x7fffffff));
}
TORCHFUSE_INLINE uint64x2_t magnitude_bits(VecD x) {
  return vandq_u64(bits_of(x), vdupq_n_u64(0x7fffffffffffffff));
}

TORCHFUSE_INLINE VecF fma(VecF a, VecF b, VecF c) { return VecF(vfmaq_f32(c.v, a.v, b.v)); }
TORCHFUSE_INLINE VecD fma(VecD a, VecD b, VecD c) { return VecD(vfmaq_f64(c.v, a.v, b.v)); }
/// FMAX alone would prefer +0 to -0. FMAX with two equal operands returns the operand, or zero if
/// denormals are flushed.
TORCHFUSE_INLINE VecF max(VecF a, VecF b) {
  const uint32x4_t takes_a = vornq_u32(vcgtq_f32(a.v, b.v), vceqq_f32(a.v, a.v));
  const float32x4_t larger = vbslq_f32(takes_a, a.v, b.v);
  return VecF(vmaxq_f32(larger, larger));
}
TORCHFUSE_INLINE VecD max(VecD a, VecD b) {
  const uint64x2_t takes_a = vornq_u64(vcgtq_f64(a.v, b.v), vceqq_f64(a.v, a.v));
  const float64x2_t larger = vbslq_f64(takes_a, a.v, b.v);
  return VecD(vmaxq_f64(larger, larger));
}
TORCHFUSE_INLINE VecF signs_or(VecF zeros, VecF a) {
  const float32x4_t up = vbslq_f32(vcgtzq_f32(a.v), vdupq_n_f32(1.0f), zeros.v);
  return VecF(vbslq_f32(vcltzq_f32(a.v), vdupq_n_f32(-1.0f), up));
}
TORCHFUSE_INLINE VecD signs_or(VecD zeros, VecD a) {
  const float64x2_t up = vbslq_f64(vcgtzq_f64(a.v), vdupq_n_f64(1.0), zeros.v);
  return VecD(vbslq_f64(vcltzq_f64(a.v), vdupq_n_f64(-1.0), up));
}
TORCHFUSE_INLINE VecF pass_where_positive(VecF gate, VecF value) {
  return from_bits(vbicq_u32(bits_of(value), vclezq_f32(gate.v)));
}
TORCHFUSE_INLINE VecD pass_where_positive(VecD gate, VecD value) {
  return from_bits(vbicq_u64(bits_of(value), vclezq_f64(gate.v)));
}

TORCHFUSE_INLINE VecF load_f32(const float* p) { return VecF(vld1q_f32(p)); }
TORCHFUSE_INLINE void store_f32(float* p, VecF x) { vst1q_f32(p, x.v); }
TORCHFUSE_INLINE VecD load_f64(const double* p) { return VecD(vld1q_f64(p)); }
TORCHFUSE_INLINE void store_f64(double* p, VecD x) { vst1q_f64(p, x.v); }
/// Loads four bf16 values into the upper halves of 32-bit integers.
TORCHFUSE_INLINE uint32x4_t widen_high(const BFloat16* p) {
  return vshlq_n_u32(vmovl_u16(vld1_u16(&p->bits)), 16);
}
TORCHFUSE_INLINE VecF load_bf16(const BFloat16* p) { return from_bits(widen_high(p)); }
/// Returns `rounded`, or the quiet NaN's bits where x is NaN.
TORCHFUSE_INLINE uint32x4_t or_nan(uint32x4_t rounded, VecF x) {
  return vbslq_u32(vceqq_f32(x.v, x.v), rounded, vdupq_n_u32(0x7fc00000));
}
TORCHFUSE_INLINE void store_bf16(BFloat16* p, VecF x) {
  const uint32x4_t bits = bits_of(x);
  const uint32x4_t lsb = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(lsb, vdupq_n_u32(0x7fff)));
  vst1_u16(&p->bits, vshrn_n_u32(or_nan(rounded, x), 16));
}
TORCHFUSE_INLINE VecF load_split(const BFloat16* param, const std::int16_t* remainder) {
  const int32x4_t low = vmovl_s16(vld1_s16(remainder));
  const uint32x4_t upper = widen_high(param);
  const VecF sum = from_bits(vaddq_u32(upper, vreinterpretq_u32_s32(low)));
  return from_bits(vbslq_u32(vceqq_f32(sum.v, sum.v), bits_of(sum), upper));
}
TORCHFUSE_INLINE void store_split(BFloat16* param, std::int16_t* remainder, VecF x) {
  const uint32x4_t bits = or_nan(bits_of(x), x);
  vst1_u16(&param->bits, vshrn_n_u32(vaddq_u32(bits, vdupq_n_u32(0x8000)), 16));
  vst1_s16(remainder, vreinterpret_s16_u16(vmovn_u32(bits)));
}
TORCHFUSE_INLINE VecF load_f16(const Half* p) {
  return VecF(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits))));
}
TORCHFUSE_INLINE void store_f16(Half* p, VecF x) {
  vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(x.v)));
}

TORCHFUSE_INLINE bool reaches(VecF x, float threshold) {
  return vmaxvq_u32(magnitude_bits(x)) >= float_bits(threshold);
}
TORCHFUSE_INLINE VecF larger_magnitude(VecF a, VecF b) {
  return from_bits(vmaxq_u32(magnitude_bits(a), magnitude_bits(b)));
}
TORCHFUSE_INLINE bool reaches(VecD x, double threshold) {
  const uint64x2_t reached = vcgeq_u64(magnitude_bits(x), bits_of(VecD(threshold)));
  return vmaxvq_u32(vreinterpretq_u32_u64(reached)) != 0;
}
TORCHFUSE_INLINE VecD larger_magnitude(VecD a, VecD b) {
  // As integers, the bits of non-negative doubles are ordered, with NaN above infinity.
  const uint64x2_t x = magnitude_bits(a);
  const uint64x2_t y = magnitude_bits(b);
  return from_bits(vbslq_u64(vcgtq_u64(x, y), x, y));
}

TORCHFUSE_INLINE VecF power_of_two(VecF shifted) {
  return from_bits(vaddq_u32(vshlq_n_u32(bits_of(shifted), 23), vdupq_n_u32(127u << 23)));
}
TORCHFUSE_INLINE VecD power_of_two(VecD shifted) {
  const uint64x2_t bias = vdupq_n_u64(std::uint64_t{1023} << 52);
  return from_bits(vaddq_u64(vshlq_n_u64(bits_of(shifted), 52), bias));
}

/// Returns 16 random bits per lane, for consecutive elements from `element` on.
TORCHFUSE_INLINE uint32x4_t random_16_vector(RoundingKey key, std::uint64_t element) {
  constexpr std::uint32_t kLanes[4] = {0, 1, 2, 3};
  const uint32x4_t base = vdupq_n_u32(static_cast<std::uint32_t>(element));
  const uint32x4_t high = vdupq_n_u32(static_cast<std::uint32_t>(element >> 32) + key.counter);
  uint32x4_t first = vaddq_u32(base, vld1q_u32(kLanes));
  // Carry into the 64-bit index's upper half: a true comparison is -1.
  uint32x4_t second = vsubq_u32(high, vcltq_u32(first, base));
  std::uint32_t round_key = key.key;
#pragma GCC unroll 7
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint32x4_t low_products =
        vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(first), kPhiloxMultiplier));
    const uint32x4_t high_products =
        vreinterpretq_u32_u64(vmull_high_n_u32(first, kPhiloxMultiplier));
    const uint32x4_t upper = vuzp2q_u32(low_products, high_products);
    first = veorq_u32(veorq_u32(upper, second), vdupq_n_u32(round_key));
    second = vuzp1q_u32(low_products, high_products);
    round_key += kPhiloxIncrement;
  }
  return vshrq_n_u32(first, 16);
}

TORCHFUSE_INLINE void store_stochastic(BFloat16* p, VecF x, RoundingKey key,
                                       std::uint64_t element) {
  const uint32x4_t sum = vaddq_u32(bits_of(x), random_16_vector(key, element));
  vst1_u16(&p->bits, vshrn_n_u32(or_nan(sum, x), 16));
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
