// SPDX-License-Identifier: BSD-3-Clause
// The vector type of this file's instruction level, in the terms that functors use: + - * /, unary
// minus through subtraction, fma, sqrt, max, sign. See Note [One object per instruction level] in
// isa.h.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
// g++ 12 warns about the deliberately undefined operands inside its own AVX-512 intrinsics (GCC bug
// 105593, fixed in 13).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "kernels/common/dtype.h"
#include "kernels/common/float16.h"
#include "kernels/common/math.h"
#include "kernels/common/param_remainder.h"
#include "kernels/cpu/flush_denormals.h"

#ifndef TORCHFUSE_ISA_NAMESPACE
#error "compile once per instruction level, with TORCHFUSE_ISA_NAMESPACE set"
#endif

#define TORCHFUSE_INLINE inline __attribute__((always_inline))

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

/// Vector `V` of accumulation type T: `kWidth` lanes.
template <class T>
struct Simd;

#if defined(__AVX512F__)

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
/// The instruction takes denormals for zero, which kernels flush anyway; otherwise it agrees with
/// to_bfloat16 on every encoding.
TORCHFUSE_INLINE void store_bf16(BFloat16* p, VecF x) {
  const __m256bh narrow = _mm512_cvtneps_pbh(x.v);
  memcpy(p, &narrow, sizeof narrow);
}
TORCHFUSE_INLINE VecF load_split(const BFloat16* param, const std::int16_t* remainder) {
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(param));
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(remainder));
  return VecF(_mm512_castsi512_ps(_mm512_add_epi32(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16), _mm512_cvtepi16_epi32(low))));
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

#elif defined(__AVX2__)

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
/// The lower halves of eight 32-bit integers below 2^16. packus works within 128-bit halves; the
/// two useful quarters are gathered.
TORCHFUSE_INLINE __m128i pack_16(__m256i x) {
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08));
}
TORCHFUSE_INLINE __m128i round_bf16(VecF x) {
  const __m256i bits = _mm256_castps_si256(x.v);
  const __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  return pack_16(
      _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), _mm256_set1_epi32(0x7fc0), nan));
}
TORCHFUSE_INLINE void store_bf16(BFloat16* p, VecF x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), round_bf16(x));
}
TORCHFUSE_INLINE VecF load_split(const BFloat16* param, const std::int16_t* remainder) {
  const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(param));
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(remainder));
  return VecF(_mm256_castsi256_ps(_mm256_add_epi32(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(high), 16), _mm256_cvtepi16_epi32(low))));
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

#endif

#if defined(__AVX2__)

TORCHFUSE_INLINE VecF operator+(VecF a, VecF b) { return VecF(TORCHFUSE_F(add)(a.v, b.v)); }
TORCHFUSE_INLINE VecF operator-(VecF a, VecF b) { return VecF(TORCHFUSE_F(sub)(a.v, b.v)); }
TORCHFUSE_INLINE VecF operator*(VecF a, VecF b) { return VecF(TORCHFUSE_F(mul)(a.v, b.v)); }
TORCHFUSE_INLINE VecF operator/(VecF a, VecF b) { return VecF(TORCHFUSE_F(div)(a.v, b.v)); }
TORCHFUSE_INLINE VecF sqrt(VecF a) { return VecF(TORCHFUSE_F(sqrt)(a.v)); }
TORCHFUSE_INLINE VecF fma(VecF a, VecF b, VecF c) {
  return VecF(TORCHFUSE_F(fmadd)(a.v, b.v, c.v));
}
TORCHFUSE_INLINE VecD operator+(VecD a, VecD b) { return VecD(TORCHFUSE_D(add)(a.v, b.v)); }
TORCHFUSE_INLINE VecD operator-(VecD a, VecD b) { return VecD(TORCHFUSE_D(sub)(a.v, b.v)); }
TORCHFUSE_INLINE VecD operator*(VecD a, VecD b) { return VecD(TORCHFUSE_D(mul)(a.v, b.v)); }
TORCHFUSE_INLINE VecD operator/(VecD a, VecD b) { return VecD(TORCHFUSE_D(div)(a.v, b.v)); }
TORCHFUSE_INLINE VecD sqrt(VecD a) { return VecD(TORCHFUSE_D(sqrt)(a.v)); }
TORCHFUSE_INLINE VecD fma(VecD a, VecD b, VecD c) {
  return VecD(TORCHFUSE_D(fmadd)(a.v, b.v, c.v));
}
TORCHFUSE_INLINE VecF sign(VecF a) { return signs_or(a * VecF(0.0f), a); }
TORCHFUSE_INLINE VecD sign(VecD a) { return signs_or(a * VecD(0.0), a); }
#undef TORCHFUSE_F
#undef TORCHFUSE_D

#else

// Baseline: one lane, scalar instructions.
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

#endif

template <>
struct Simd<float> {
  using V = VecF;
  static constexpr int kWidth = sizeof(VecF) / sizeof(float);
};
template <>
struct Simd<double> {
  using V = VecD;
  static constexpr int kWidth = sizeof(VecD) / sizeof(double);
};

/// Loads one vector from element `index` of an operand of storage type `dtype`. The branch is the
/// same for every vector of a launch and hides behind the division and the square root.
TORCHFUSE_INLINE VecF load(const void* operand, std::int64_t index, DType dtype, float) {
  if (dtype == DType::kFloat32) return load_f32(static_cast<const float*>(operand) + index);
  if (dtype == DType::kBFloat16) return load_bf16(static_cast<const BFloat16*>(operand) + index);
  return load_f16(static_cast<const Half*>(operand) + index);
}
TORCHFUSE_INLINE VecD load(const void* operand, std::int64_t index, DType, double) {
  return load_f64(static_cast<const double*>(operand) + index);
}
TORCHFUSE_INLINE void store(void* operand, std::int64_t index, DType dtype, VecF x, float) {
  if (dtype == DType::kFloat32) return store_f32(static_cast<float*>(operand) + index, x);
  if (dtype == DType::kBFloat16) return store_bf16(static_cast<BFloat16*>(operand) + index, x);
  store_f16(static_cast<Half*>(operand) + index, x);
}
TORCHFUSE_INLINE void store(void* operand, std::int64_t index, DType, VecD x, double) {
  store_f64(static_cast<double*>(operand) + index, x);
}

TORCHFUSE_INLINE void prefetch(const void* operand, std::int64_t byte_offset) {
  __builtin_prefetch(static_cast<const char*>(operand) + byte_offset, 0, 3);
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
