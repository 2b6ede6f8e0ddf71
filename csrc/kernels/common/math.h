// SPDX-License-Identifier: BSD-3-Clause
// The few operations that functors are written in, with one rounding rule everywhere: each call is
// rounded once, to nearest even. Built with -ffp-contract=off and -fmad=false, so a multiply-add is
// fused exactly where a functor says `fma`.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/common/macros.h"

namespace torchfuse::kernels {

#if !defined(__CUDA_ARCH__) && !defined(__FMA__) && !defined(__ARM_FEATURE_FMA)
#define TORCHFUSE_EMULATED_FMA
#endif

#if defined(TORCHFUSE_EMULATED_FMA)
/// Correctly rounded a * b + c without the instruction. The product of two floats is exact in
/// double; rounding the sum to odd there makes the final rounding to float the only one that counts
/// (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using
/// rounding to odd", 2008).
TORCHFUSE_HOST_DEVICE float emulated_fma(float a, float b, float c) {
  const double product = static_cast<double>(a) * static_cast<double>(b);
  const double addend = static_cast<double>(c);
  const double sum = product + addend;
  const double addend_part = sum - product;
  const double error = (product - (sum - addend_part)) + (addend - addend_part);
  std::uint64_t bits;
  memcpy(&bits, &sum, sizeof bits);
  // An inexact, finite sum with an even last bit moves one step towards the lost remainder.
  const bool finite = (bits & 0x7ff0000000000000ull) != 0x7ff0000000000000ull;
  if (finite && error != 0.0 && (bits & 1u) == 0) {
    const bool away_from_zero = (error > 0.0) == (sum > 0.0);
    bits = away_from_zero ? bits + 1 : bits - 1;
  }
  double odd;
  memcpy(&odd, &bits, sizeof odd);
  return static_cast<float>(odd);
}
#endif

TORCHFUSE_HOST_DEVICE float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#elif defined(TORCHFUSE_EMULATED_FMA)
  return emulated_fma(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

TORCHFUSE_HOST_DEVICE double fma(double a, double b, double c) {
#if defined(__CUDA_ARCH__)
  return __fma_rn(a, b, c);
#else
  return __builtin_fma(a, b, c);
#endif
}

TORCHFUSE_HOST_DEVICE float sqrt(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

TORCHFUSE_HOST_DEVICE double sqrt(double x) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(x);
#else
  return __builtin_sqrt(x);
#endif
}

/// The larger value; NaN if either is NaN, as torch.maximum; b of two zeros, as MAXPS. An operation
/// like the others: where denormals are flushed, its result is. A mere choice would let them pass.
template <class T>
TORCHFUSE_HOST_DEVICE T max(T a, T b) {
  const T larger = (a != a || a > b) ? a : b;
#if defined(TORCHFUSE_EMULATED_FMA)
  // Of the emulation, a compiler may see that it changes nothing.
  return larger == T(0) ? larger * T(0) : larger;
#else
  return fma(larger, T(1), T(-0.0));
#endif
}

/// 1, -1 or the zero that `a` is; NaN stays NaN. Where denormals are flushed they count as zeros,
/// and the product, unlike `a` itself, is a zero then.
template <class T>
TORCHFUSE_HOST_DEVICE T sign(T a) {
  return a > T(0) ? T(1) : a < T(0) ? T(-1) : a * T(0);
}

/// `value` where a ReLU of `gate` lets a gradient pass, as torch's: 0 where gate <= 0.
template <class T>
TORCHFUSE_HOST_DEVICE T pass_where_positive(T gate, T value) {
  return gate <= T(0) ? T(0) : value;
}

/// A number that is computed in fp64, rounded to T. As a float it is a zero where it would be
/// denormal. What is rounded up to the smallest normal float is that one, as x86 and nvcc's code
/// with -ftz=true make it; aarch64 looks at the number before it is rounded, and would make a zero.
template <class T>
TORCHFUSE_HOST_DEVICE T round_to(double x) {
#if !defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) < sizeof(double)) {
    constexpr double kRoundedUp = 0x1.ffffffp-127;
    if (__builtin_fabs(x) < 0x1p-126) {
      x = __builtin_fabs(x) < kRoundedUp ? x * 0.0 : __builtin_copysign(0x1p-126, x);
    }
  }
#endif
  return static_cast<T>(x);
}

/// Note [Decay rates of zero]
/// m += (1 - beta) (g - m) keeps a moment that decays slowly most exactly. With beta = 0, as in
/// GANs, it should forget all of m, and in rounded numbers does not: where g is far below m, g - m
/// is -m, and nothing is left. So a moment of that rate counts as 0 before. The choice is made
/// there because a GPU holds it in a predicate, and no operand longer than without it.
template <class T>
TORCHFUSE_HOST_DEVICE bool forgotten(T one_minus_beta) {
  return one_minus_beta == T(1);
}

struct Powers {
  double a;
  double b;
};

/// a^exponent and b^exponent, both below 1, for a whole exponent >= 0 by repeated squaring: the
/// same bits on every device, which `pow` does not promise. On a GPU one thread computes them while
/// its team waits: products of the two do not wait for each other, and four bits take one branch.
/// Squares behind the last bit are not used.
TORCHFUSE_HOST_DEVICE Powers integer_powers(double a, double b, double exponent) {
  std::uint64_t remaining = static_cast<std::uint64_t>(exponent);
  Powers result{1.0, 1.0};
  while (remaining != 0) {
    for (int bit = 0; bit < 4; ++bit) {
      if ((remaining & 1u) != 0) {
        result.a = result.a * a;
        result.b = result.b * b;
      }
      a = a * a;
      b = b * b;
      remaining >>= 1;
    }
  }
  return result;
}

}  // namespace torchfuse::kernels
