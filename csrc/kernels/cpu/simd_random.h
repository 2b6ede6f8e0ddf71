// SPDX-License-Identifier: BSD-3-Clause
// Stochastic rounding of one vector: the bits of common/stochastic_rounding.h, for as many elements
// at a time as this file's instruction level has lanes.
#pragma once

#include <cstdint>

#include "kernels/common/stochastic_rounding.h"
#include "kernels/cpu/simd.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

#if defined(__AVX512F__)

/// 16 random bits in every lane, for elements from `element` on.
TORCHFUSE_INLINE __m512i random_16_vector(RoundingKey key, std::uint64_t element) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i base = _mm512_set1_epi32(static_cast<int>(static_cast<std::uint32_t>(element)));
  const __m512i high =
      _mm512_set1_epi32(static_cast<int>(static_cast<std::uint32_t>(element >> 32) + key.counter));
  const __m512i multiplier = _mm512_set1_epi32(static_cast<int>(kPhiloxMultiplier));
  __m512i first = _mm512_add_epi32(base, lanes);
  // The index is 64 bits wide.
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

#elif defined(__AVX2__)

TORCHFUSE_INLINE __m256i random_16_vector(RoundingKey key, std::uint64_t element) {
  const __m256i lanes = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  const __m256i base = _mm256_set1_epi32(static_cast<int>(static_cast<std::uint32_t>(element)));
  const std::uint32_t high = static_cast<std::uint32_t>(element >> 32) + key.counter;
  const __m256i multiplier = _mm256_set1_epi32(static_cast<int>(kPhiloxMultiplier));
  __m256i first = _mm256_add_epi32(base, lanes);
  // The index is 64 bits wide: one more above, minus one in the lanes without a carry.
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

#else

TORCHFUSE_INLINE void store_stochastic(BFloat16* p, VecF x, RoundingKey key,
                                       std::uint64_t element) {
  *p = round_stochastically(x, random_16(key, element));
}

#endif

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
