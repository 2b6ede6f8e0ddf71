// SPDX-License-Identifier: BSD-3-Clause
// What common/exp.h asks of vectors. See Note [Exponential] there.
#pragma once

#include "kernels/common/exp.h"
#include "kernels/cpu/simd.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

#if defined(__AVX512F__)
TORCHFUSE_INLINE VecF times_power_of_two(VecF x, VecF shifted) {
  const __m512i exponents = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
  return VecF(_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x.v), exponents)));
}
TORCHFUSE_INLINE VecD times_power_of_two(VecD x, VecD shifted) {
  const __m512i exponents = _mm512_slli_epi64(_mm512_castpd_si512(shifted.v), 52);
  return VecD(_mm512_castsi512_pd(_mm512_add_epi64(_mm512_castpd_si512(x.v), exponents)));
}
#elif defined(__AVX2__)
TORCHFUSE_INLINE VecF times_power_of_two(VecF x, VecF shifted) {
  const __m256i exponents = _mm256_slli_epi32(_mm256_castps_si256(shifted.v), 23);
  return VecF(_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x.v), exponents)));
}
TORCHFUSE_INLINE VecD times_power_of_two(VecD x, VecD shifted) {
  const __m256i exponents = _mm256_slli_epi64(_mm256_castpd_si256(shifted.v), 52);
  return VecD(_mm256_castsi256_pd(_mm256_add_epi64(_mm256_castpd_si256(x.v), exponents)));
}
#endif

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
