// SPDX-License-Identifier: BSD-3-Clause
// AVX2 level with 256-bit vectors. Include simd.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/level.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

struct VecF {
  __m256 v;
  VecF() = default;
  TORCHFUSE_INLINE explicit VecF(float x) : v(_mm256_set1_ps(x)) {}
  TORCHFUSE_INLINE explicit VecF(__m256 x) : v(x) {}
};
struct VecD {
  __m256d v;
  VecD() = default;
  TORCHFUSE_INLINE explicit VecD(double x) : v(_mm256_set1_pd(x)) {}
  TORCHFUSE_INLINE explicit VecD(__m256d x) : v(x) {}
};
#define TORCHFUSE_F(op) _mm256_##op##_ps
#define TORCHFUSE_D(op) _mm256_##op##_pd

TORCHFUSE_INLINE VecF fma(VecF a, VecF b, VecF c) { return VecF(_mm256_fmadd_ps(a.v, b.v, c.v)); }
TORCHFUSE_INLINE VecD fma(VecD a, VecD b, VecD c) { return VecD(_mm256_fmadd_pd(a.v, b.v, c.v)); }
TORCHFUSE_INLINE VecF max(VecF a, VecF b) {
  const __m256 keep_a = _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q);
  return VecF(_mm256_blendv_ps(_mm256_max_ps(a.v, b.v), a.v, keep_a));
}
TORCHFUSE_INLINE VecD max(VecD a, VecD b) {
  const __m256d keep_a = _mm256_cmp_pd(a.v, a.v, _CMP_UNORD_Q);
  return VecD(_mm256_blendv_pd(_mm256_max_pd(a.v, b.v), a.v, keep_a));
}
TORCHFUSE_INLINE VecF signs_or(VecF zeros, VecF a) {
  const __m256 zero = _mm256_setzero_ps();
  const __m256 up =
      _mm256_blendv_ps(zeros.v, _mm256_set1_ps(1.0f), _mm256_cmp_ps(a.v, zero, _CMP_GT_OQ));
  return VecF(_mm256_blendv_ps(up, _mm256_set1_ps(-1.0f), _mm256_cmp_ps(a.v, zero, _CMP_LT_OQ)));
}
TORCHFUSE_INLINE VecD signs_or(VecD zeros, VecD a) {
  const __m256d zero = _mm256_setzero_pd();
  const __m256d up =
      _mm256_blendv_pd(zeros.v, _mm256_set1_pd(1.0), _mm256_cmp_pd(a.v, zero, _CMP_GT_OQ));
  return VecD(_mm256_blendv_pd(up, _mm256_set1_pd(-1.0), _mm256_cmp_pd(a.v, zero, _CMP_LT_OQ)));
}
TORCHFUSE_INLINE VecF load_f32(const float* p) { return VecF(_mm256_loadu_ps(p)); }
TORCHFUSE_INLINE void store_f32(float* p, VecF x) { _mm256_storeu_ps(p, x.v); }
TORCHFUSE_INLINE VecD load_f64(const double* p) { return VecD(_mm256_loadu_pd(p)); }
TORCHFUSE_INLINE void store_f64(double* p, VecD x) { _mm256_storeu_pd(p, x.v); }
TORCHFUSE_INLINE VecF load_bf16(const BFloat16* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return VecF(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16)));
}
/// Returns the lower halves of eight 32-bit integers below 2^16. packus works within 128-bit
/// halves, so a permutation joins the two useful quarters.
TORCHFUSE_INLINE __m128i pack_16(__m256i x) {
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08));
}
/// Returns the nearest bf16 values in the upper halves of 32-bit integers. The lower halves are
/// unspecified.
TORCHFUSE_INLINE __m256i rounded_bf16(VecF x) {
  const __m256i bits = _mm256_castps_si256(x.v);
  const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
}
TORCHFUSE_INLINE __m128i round_bf16(VecF x) {
  return pack_16(_mm256_srli_epi32(rounded_bf16(x), 16));
}
TORCHFUSE_INLINE void store_bf16(BFloat16* p, VecF x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), round_bf16(x));
}
TORCHFUSE_INLINE constexpr bool pairs_are_faster(VecF) { return true; }
/// Loads sixteen elements, split by even and odd index. Every 32-bit word contains an even and an
/// odd element, so no element moves between words, for which a processor has only two units.
TORCHFUSE_INLINE void load_bf16_pair(const BFloat16* p, VecF& even, VecF& odd) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  even = VecF(_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)));
  odd = VecF(_mm256_castsi256_ps(_mm256_blend_epi16(_mm256_setzero_si256(), words, 0xaa)));
}
TORCHFUSE_INLINE void store_bf16_pair(BFloat16* p, VecF even, VecF odd) {
  const __m256i lower = _mm256_srli_epi32(rounded_bf16(even), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm256_blend_epi16(lower, rounded_bf16(odd), 0xaa));
}
TORCHFUSE_INLINE VecF load_split(const BFloat16* param, const std::int16_t* remainder) {
  const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(param));
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(remainder));
  const __m256i upper = _mm256_slli_epi32(_mm256_cvtepu16_epi32(high), 16);
  const __m256 sum = _mm256_castsi256_ps(_mm256_add_epi32(upper, _mm256_cvtepi16_epi32(low)));
  return VecF(
      _mm256_blendv_ps(sum, _mm256_castsi256_ps(upper), _mm256_cmp_ps(sum, sum, _CMP_UNORD_Q)));
}
TORCHFUSE_INLINE void store_split(BFloat16* param, std::int16_t* remainder, VecF x) {
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  const __m256i bits =
      _mm256_blendv_epi8(_mm256_castps_si256(x.v), _mm256_set1_epi32(0x7fc00000), nan);
  const __m256i high = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)), 16);
  const __m256i low = _mm256_and_si256(bits, _mm256_set1_epi32(0xffff));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(param), pack_16(high));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(remainder), pack_16(low));
}
TORCHFUSE_INLINE VecF load_f16(const Half* p) {
  return VecF(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
TORCHFUSE_INLINE void store_f16(Half* p, VecF x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

TORCHFUSE_INLINE VecF pass_where_positive(VecF gate, VecF value) {
  return VecF(_mm256_and_ps(_mm256_cmp_ps(gate.v, _mm256_setzero_ps(), _CMP_NLE_UQ), value.v));
}
TORCHFUSE_INLINE VecD pass_where_positive(VecD gate, VecD value) {
  return VecD(_mm256_and_pd(_mm256_cmp_pd(gate.v, _mm256_setzero_pd(), _CMP_NLE_UQ), value.v));
}

TORCHFUSE_INLINE bool reaches(VecF x, float threshold) {
  const __m256i bits = _mm256_and_si256(_mm256_castps_si256(x.v), _mm256_set1_epi32(0x7fffffff));
  const __m256i limit = _mm256_set1_epi32(static_cast<int>(float_bits(threshold)));
  return _mm256_movemask_epi8(_mm256_cmpgt_epi32(limit, bits)) != -1;
}
TORCHFUSE_INLINE VecF larger_magnitude(VecF a, VecF b) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  return VecF(
      _mm256_castsi256_ps(_mm256_max_epu32(_mm256_and_si256(_mm256_castps_si256(a.v), mask),
                                           _mm256_and_si256(_mm256_castps_si256(b.v), mask))));
}
TORCHFUSE_INLINE bool reaches(VecD x, double threshold) {
  const __m256d absolute = _mm256_andnot_pd(_mm256_set1_pd(-0.0), x.v);
  return _mm256_movemask_pd(_mm256_cmp_pd(absolute, _mm256_set1_pd(threshold), _CMP_NLT_UQ)) != 0;
}
TORCHFUSE_INLINE VecD larger_magnitude(VecD a, VecD b) {
  // As signed integers, the bits of non-negative doubles are ordered, with NaN above infinity.
  const __m256i mask = _mm256_set1_epi64x(0x7fffffffffffffff);
  const __m256i x = _mm256_and_si256(_mm256_castpd_si256(a.v), mask);
  const __m256i y = _mm256_and_si256(_mm256_castpd_si256(b.v), mask);
  return VecD(_mm256_castsi256_pd(_mm256_blendv_epi8(y, x, _mm256_cmpgt_epi64(x, y))));
}

TORCHFUSE_INLINE VecF power_of_two(VecF shifted) {
  const __m256i exponents = _mm256_slli_epi32(_mm256_castps_si256(shifted.v), 23);
  return VecF(_mm256_castsi256_ps(_mm256_add_epi32(exponents, _mm256_set1_epi32(127 << 23))));
}
TORCHFUSE_INLINE VecD power_of_two(VecD shifted) {
  const __m256i exponents = _mm256_slli_epi64(_mm256_castpd_si256(shifted.v), 52);
  return VecD(_mm256_castsi256_pd(_mm256_add_epi64(exponents, _mm256_set1_epi64x(1023LL << 52))));
}

TORCHFUSE_INLINE __m256i random_16_vector(RoundingKey key, std::uint64_t element) {
  const __m256i lanes = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  const __m256i base = _mm256_set1_epi32(static_cast<int>(static_cast<std::uint32_t>(element)));
  const std::uint32_t high = static_cast<std::uint32_t>(element >> 32) + key.counter;
  const __m256i multiplier = _mm256_set1_epi32(static_cast<int>(kPhiloxMultiplier));
  __m256i first = _mm256_add_epi32(base, lanes);
  // Carry into the 64-bit index's upper half: add 1, then subtract 1 in lanes without a carry.
  const __m256i no_carry = _mm256_cmpeq_epi32(_mm256_max_epu32(first, base), first);
  __m256i second = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(high + 1)), no_carry);
  std::uint32_t round_key = key.key;
#pragma GCC unroll 7
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const __m256i even = _mm256_mul_epu32(first, multiplier);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(first, 32), multiplier);
    const __m256i upper = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
    const __m256i lower = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    first = _mm256_xor_si256(_mm256_xor_si256(upper, second),
                             _mm256_set1_epi32(static_cast<int>(round_key)));
    second = lower;
    round_key += kPhiloxIncrement;
  }
  return _mm256_srli_epi32(first, 16);
}

TORCHFUSE_INLINE void store_stochastic(BFloat16* p, VecF x, RoundingKey key,
                                       std::uint64_t element) {
  const __m256i sum = _mm256_add_epi32(_mm256_castps_si256(x.v), random_16_vector(key, element));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  const __m256i rounded =
      _mm256_blendv_epi8(_mm256_srli_epi32(sum, 16), _mm256_set1_epi32(0x7fc0), nan);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), pack_16(rounded));
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
