// SPDX-License-Identifier: BSD-3-Clause
// The vector type of this file's instruction level, with the operations that functors use: + - * /,
// unary minus through subtraction, fma, sqrt, max, sign, pass_where_positive. Also loads, stores,
// and bit operations for sums and rounding. See Note [One object per instruction level] in isa.h.
#pragma once

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/cpu/flush_denormals.h"
#include "kernels/cpu/level.h"
#if defined(__AVX512F__)
#include "kernels/cpu/simd_avx512.h"
#elif defined(__AVX2__)
#include "kernels/cpu/simd_avx2.h"
#elif defined(TORCHFUSE_NEON)
#include "kernels/cpu/simd_neon.h"
#else
#include "kernels/cpu/simd_baseline.h"
#endif

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

/// The number that fills a vector of type V.
template <class V>
struct ScalarOf {
  using Type = V;
};

#if defined(TORCHFUSE_F)
template <>
struct ScalarOf<VecF> {
  using Type = float;
};
template <>
struct ScalarOf<VecD> {
  using Type = double;
};
TORCHFUSE_INLINE VecF operator+(VecF a, VecF b) { return VecF(TORCHFUSE_F(add)(a.v, b.v)); }
TORCHFUSE_INLINE VecF operator-(VecF a, VecF b) { return VecF(TORCHFUSE_F(sub)(a.v, b.v)); }
TORCHFUSE_INLINE VecF operator*(VecF a, VecF b) { return VecF(TORCHFUSE_F(mul)(a.v, b.v)); }
TORCHFUSE_INLINE VecF operator/(VecF a, VecF b) { return VecF(TORCHFUSE_F(div)(a.v, b.v)); }
TORCHFUSE_INLINE VecF sqrt(VecF a) { return VecF(TORCHFUSE_F(sqrt)(a.v)); }
TORCHFUSE_INLINE VecD operator+(VecD a, VecD b) { return VecD(TORCHFUSE_D(add)(a.v, b.v)); }
TORCHFUSE_INLINE VecD operator-(VecD a, VecD b) { return VecD(TORCHFUSE_D(sub)(a.v, b.v)); }
TORCHFUSE_INLINE VecD operator*(VecD a, VecD b) { return VecD(TORCHFUSE_D(mul)(a.v, b.v)); }
TORCHFUSE_INLINE VecD operator/(VecD a, VecD b) { return VecD(TORCHFUSE_D(div)(a.v, b.v)); }
TORCHFUSE_INLINE VecD sqrt(VecD a) { return VecD(TORCHFUSE_D(sqrt)(a.v)); }
TORCHFUSE_INLINE VecF sign(VecF a) { return signs_or(a * VecF(0.0f), a); }
TORCHFUSE_INLINE VecD sign(VecD a) { return signs_or(a * VecD(0.0), a); }
#undef TORCHFUSE_F
#undef TORCHFUSE_D
#endif

/// Vector `V` of accumulation type T: `kWidth` lanes.
template <class T>
struct Simd;
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

/// Loads a vector from element `index` of an operand with storage type `dtype`. The branch is the
/// same for every vector in a launch and overlaps with the division and the square root.
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

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
