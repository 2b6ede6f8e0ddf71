// SPDX-License-Identifier: BSD-3-Clause
// AVX-512 level with 512-bit vectors. Include simd.h.
#pragma once

#include <cstdint>
#include <cstring>

// g++ 12 warns about the deliberately undefined operands inside its own AVX-512 intrinsics (GCC bug
// 105593, fixed in 13).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "kernels/cpu/isa.h"
#include "kernels/cpu/level.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

struct VecF {
  __m512 v;
  VecF() = default;
  TORCHFUSE_INLINE explicit VecF(float x) : v(_mm512_set1_ps(x)) {}
  TORCHFUSE_INLINE explicit VecF(__m512 x) : v(x) {}
};
struct VecD {
  __m512d v;
  VecD() = default;
  TORCHFUSE_INLINE explicit VecD(double x) : v(_mm512_set1_pd(x)) {}
  TORCHFUSE_INLINE explicit VecD(__m512d x) : v(x) {}
};
#define TORCHFUSE_F(op) _mm512_##op##_ps
#define TORCHFUSE_D(op) _mm512_##op##_pd

TORCHFUSE_INLINE VecF fma(VecF a, VecF b, VecF c) { return VecF(_mm512_fmadd_ps(a.v, b.v, c.v)); }
TORCHFUSE_INLINE VecD fma(VecD a, VecD b, VecD c) { return VecD(_mm512_fmadd_pd(a.v, b.v, c.v)); }
TORCHFUSE_INLINE VecF max(VecF a, VecF b) {
  const __mmask16 keep_a = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return VecF(_mm512_mask_mov_ps(_mm512_max_ps(a.v, b.v), keep_a, a.v));
}
TORCHFUSE_INLINE VecD max(VecD a, VecD b) {
  const __mmask8 keep_a = _mm512_cmp_pd_mask(a.v, a.v, _CMP_UNORD_Q);
  return VecD(_mm512_mask_mov_pd(_mm512_max_pd(a.v, b.v), keep_a, a.v));
}
TORCHFUSE_INLINE VecF signs_or(VecF zeros, VecF a) {
  const __m512 zero = _mm512_setzero_ps();
  const __m512 up =
      _mm512_mask_mov_ps(zeros.v, _mm512_cmp_ps_mask(a.v, zero, _CMP_GT_OQ), _mm512_set1_ps(1.0f));
  return VecF(
      _mm512_mask_mov_ps(up, _mm512_cmp_ps_mask(a.v, zero, _CMP_LT_OQ), _mm512_set1_ps(-1.0f)));
}
TORCHFUSE_INLINE VecD signs_or(VecD zeros, VecD a) {
  const __m512d zero = _mm512_setzero_pd();
  const __m512d up =
      _mm512_mask_mov_pd(zeros.v, _mm512_cmp_pd_mask(a.v, zero, _CMP_GT_OQ), _mm512_set1_pd(1.0));
  return VecD(
      _mm512_mask_mov_pd(up, _mm512_cmp_pd_mask(a.v, zero, _CMP_LT_OQ), _mm512_set1_pd(-1.0)));
}
TORCHFUSE_INLINE VecF load_f32(const float* p) { return VecF(_mm512_loadu_ps(p)); }
TORCHFUSE_INLINE void store_f32(float* p, VecF x) { _mm512_storeu_ps(p, x.v); }
TORCHFUSE_INLINE VecD load_f64(const double* p) { return VecD(_mm512_loadu_pd(p)); }
TORCHFUSE_INLINE void store_f64(double* p, VecD x) { _mm512_storeu_pd(p, x.v); }
TORCHFUSE_INLINE VecF load_bf16(const BFloat16* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return VecF(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16)));
}
TORCHFUSE_INLINE bool has_bf16_instruction() {
  return __atomic_load_n(&bf16_instruction, __ATOMIC_RELAXED);
}
/// Returns the nearest bf16 values in the upper halves of 32-bit integers. The lower halves are
/// unspecified.
TORCHFUSE_INLINE __m512i rounded_bf16(VecF x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  const __m512i even = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
  const __m512i sum = _mm512_mask_add_epi32(even, odd, bits, _mm512_set1_epi32(0x8000));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(sum, nan, _mm512_set1_epi32(0x7fc00000));
}
/// The instruction keeps NaN payloads and treats denormals as zero. Otherwise the result equals
/// to_bfloat16(). Kernels flush denormals anyway, except for gradients that batch normalization
/// passes to a residual unchanged. Compilers use the instruction for the intrinsic only.
TORCHFUSE_INLINE void store_bf16(BFloat16* p, VecF x) {
  if (has_bf16_instruction()) {
    const __m256bh narrow = _mm512_cvtneps_pbh(x.v);
    memcpy(p, &narrow, sizeof narrow);
    return;
  }
  const __m512i narrow = _mm512_srli_epi32(rounded_bf16(x), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(narrow));
}
/// As at the AVX2 level. The instruction is faster than pairs.
TORCHFUSE_INLINE bool pairs_are_faster(VecF) { return !has_bf16_instruction(); }
TORCHFUSE_INLINE void load_bf16_pair(const BFloat16* p, VecF& even, VecF& odd) {
  const __m512i words = _mm512_loadu_si512(p);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  even = VecF(_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)));
  odd = VecF(_mm512_castsi512_ps(_mm512_and_si512(words, upper)));
}
TORCHFUSE_INLINE void store_bf16_pair(BFloat16* p, VecF even, VecF odd) {
  const __m512i lower = _mm512_srli_epi32(rounded_bf16(even), 16);
  _mm512_storeu_si512(p, _mm512_mask_blend_epi16(0xaaaaaaaa, lower, rounded_bf16(odd)));
}
TORCHFUSE_INLINE VecF load_split(const BFloat16* param, const std::int16_t* remainder) {
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(param));
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(remainder));
  const __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16);
  const __m512 sum = _mm512_castsi512_ps(_mm512_add_epi32(upper, _mm512_cvtepi16_epi32(low)));
  const __mmask16 nan = _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q);
  return VecF(_mm512_mask_mov_ps(sum, nan, _mm512_castsi512_ps(upper)));
}
TORCHFUSE_INLINE void store_split(BFloat16* param, std::int16_t* remainder, VecF x) {
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  const __m512i bits =
      _mm512_mask_mov_epi32(_mm512_castps_si512(x.v), nan, _mm512_set1_epi32(0x7fc00000));
  const __m512i high = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(param), _mm512_cvtepi32_epi16(high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(remainder), _mm512_cvtepi32_epi16(bits));
}
TORCHFUSE_INLINE VecF load_f16(const Half* p) {
  return VecF(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
TORCHFUSE_INLINE void store_f16(Half* p, VecF x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

TORCHFUSE_INLINE VecF pass_where_positive(VecF gate, VecF value) {
  return VecF(
      _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(gate.v, _mm512_setzero_ps(), _CMP_NLE_UQ), value.v));
}
TORCHFUSE_INLINE VecD pass_where_positive(VecD gate, VecD value) {
  return VecD(
      _mm512_maskz_mov_pd(_mm512_cmp_pd_mask(gate.v, _mm512_setzero_pd(), _CMP_NLE_UQ), value.v));
}

TORCHFUSE_INLINE bool reaches(VecF x, float threshold) {
  const __m512i bits = _mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x7fffffff));
  const __m512i limit = _mm512_set1_epi32(static_cast<int>(float_bits(threshold)));
  return _mm512_cmpge_epu32_mask(bits, limit) != 0;
}
TORCHFUSE_INLINE VecF larger_magnitude(VecF a, VecF b) {
  const __m512i mask = _mm512_set1_epi32(0x7fffffff);
  return VecF(
      _mm512_castsi512_ps(_mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(a.v), mask),
                                           _mm512_and_si512(_mm512_castps_si512(b.v), mask))));
}
TORCHFUSE_INLINE bool reaches(VecD x, double threshold) {
  return _mm512_cmp_pd_mask(_mm512_abs_pd(x.v), _mm512_set1_pd(threshold), _CMP_NLT_UQ) != 0;
}
TORCHFUSE_INLINE VecD larger_magnitude(VecD a, VecD b) {
  const __m512i mask = _mm512_set1_epi64(0x7fffffffffffffff);
  return VecD(
      _mm512_castsi512_pd(_mm512_max_epu64(_mm512_and_si512(_mm512_castpd_si512(a.v), mask),
                                           _mm512_and_si512(_mm512_castpd_si512(b.v), mask))));
}

TORCHFUSE_INLINE VecF power_of_two(VecF shifted) {
  const __m512i exponents = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
  return VecF(_mm512_castsi512_ps(_mm512_add_epi32(exponents, _mm512_set1_epi32(127 << 23))));
}
TORCHFUSE_INLINE VecD power_of_two(VecD shifted) {
  const __m512i exponents = _mm512_slli_epi64(_mm512_castpd_si512(shifted.v), 52);
  return VecD(_mm512_castsi512_pd(_mm512_add_epi64(exponents, _mm512_set1_epi64(1023LL << 52))));
}

/// Returns 16 random bits per lane, for consecutive elements from `element` on.
TORCHFUSE_INLINE __m512i random_16_vector(RoundingKey key, std::uint64_t element) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i base = _mm512_set1_epi32(static_cast<int>(static_cast<std::uint32_t>(element)));
  const __m512i high =
      _mm512_set1_epi32(static_cast<int>(static_cast<std::uint32_t>(element >> 32) + key.counter));
  const __m512i multiplier = _mm512_set1_epi32(static_cast<int>(kPhiloxMultiplier));
  __m512i first = _mm512_add_epi32(base, lanes);
  // Carry into the 64-bit index's upper half.
  const __mmask16 carry = _mm512_cmplt_epu32_mask(first, base);
  __m512i second = _mm512_mask_add_epi32(high, carry, high, _mm512_set1_epi32(1));
  std::uint32_t round_key = key.key;
#pragma GCC unroll 7
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const __m512i even = _mm512_mul_epu32(first, multiplier);
    const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(first, 32), multiplier);
    const __m512i upper = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
    const __m512i lower = _mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32));
    first = _mm512_xor_epi32(_mm512_xor_epi32(upper, second),
                             _mm512_set1_epi32(static_cast<int>(round_key)));
    second = lower;
    round_key += kPhiloxIncrement;
  }
  return _mm512_srli_epi32(first, 16);
}

TORCHFUSE_INLINE void store_stochastic(BFloat16* p, VecF x, RoundingKey key,
                                       std::uint64_t element) {
  const __m512i sum = _mm512_add_epi32(_mm512_castps_si512(x.v), random_16_vector(key, element));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  const __m512i rounded =
      _mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), nan, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
