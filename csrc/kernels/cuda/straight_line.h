// SPDX-License-Identifier: BSD-3-Clause
// Quotients and square roots without a branch, for operands of usual magnitudes.
//
// Note [Straight-line quotients]
// nvcc compiles a division or a square root to a few steps from the hardware's approximation, and a
// branch to a subroutine for operands of unusual magnitudes. No instruction of another element can
// move across the branch, so a thread would compute its elements one after another. Here all
// elements of a group take the steps without a branch. One check covers the group. Only a group
// with an unusual operand calls the compiler's functions. Either way the results are the
// compiler's.
//
// The steps are nvcc's own, for all architectures from 7.5 to 12.0, so that the hardware's
// approximations suffice for them. (nvcc's remainders have the other sign, and are not flushed. In
// the usual range neither matters.) Correctly rounded approximations suffice too: see
// test_straight_line.cpp.
#pragma once

#include <cstdint>

#include "kernels/common/float16.h"
#include "kernels/common/macros.h"
#include "kernels/common/math.h"

namespace torchfuse::kernels::cuda {

TORCHFUSE_HOST_DEVICE float approximate_reciprocal(float b) {
#if defined(__CUDA_ARCH__)
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(b));
  return reciprocal;
#else
  return 1.0f / b;
#endif
}

TORCHFUSE_HOST_DEVICE float approximate_inverse_sqrt(float x) {
#if defined(__CUDA_ARCH__)
  float inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
#else
  return 1.0f / __builtin_sqrtf(x);
#endif
}

/// Returns a / b from an approximation of 1 / b. A Newton step improves the reciprocal. The
/// quotient's exact remainder corrects the quotient. A zero `a` keeps its sign, because the
/// remainder is subtracted.
TORCHFUSE_HOST_DEVICE float quotient_from(float reciprocal, float a, float b) {
  const float better = fma(reciprocal, fma(-b, reciprocal, 1.0f), reciprocal);
  const float quotient = a * better;
  return fma(-better, fma(b, quotient, -a), quotient);
}

/// Returns whether `quotient`, from quotient_from(), is a / b. The remainder must not underflow
/// (|a| >= 2^-78, or a = 0), and neither may the quotient (b <= 2^46). b must not be negative. A
/// zero or denormal b, or an overflow on the way, leaves an infinity or NaN as the quotient.
TORCHFUSE_HOST_DEVICE bool is_usual_quotient(float a, float b, float quotient) {
  constexpr std::uint32_t kLeast = (127u - 78) << 24;  // without its sign, shifted left
  constexpr std::uint32_t kMost = (127u + 46) << 23;
  const bool a_is_usual = (float_bits(a) << 1) - 1u >= kLeast - 1u;
  const bool b_is_usual = float_bits(b) <= kMost;
  return a_is_usual & b_is_usual & (__builtin_fabsf(quotient) <= 0x1p127f);
}

/// Returns sqrt(x) from an approximation of 1 / sqrt(max(x, kLeastRoot)). The exact remainder
/// corrects the root.
TORCHFUSE_HOST_DEVICE float sqrt_from(float inverse, float x) {
  const float root = x * inverse;
  return fma(fma(-root, root, x), 0.5f * inverse, root);
}

/// From this number on, sqrt_from()'s remainder cannot underflow.
constexpr float kLeastRoot = 0x1p-78f;

/// Returns whether sqrt_from() returns the root of x: 0, or a finite number from kLeastRoot on.
TORCHFUSE_HOST_DEVICE bool has_usual_sqrt(float x) {
  constexpr std::uint32_t kLeast = (127u - 78) << 23;
  constexpr std::uint32_t kInfinity = 255u << 23;
  return (float_bits(x) - 1u >= kLeast - 1u) & (float_bits(x) < kInfinity);
}

}  // namespace torchfuse::kernels::cuda
