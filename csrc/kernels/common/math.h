// SPDX-License-Identifier: BSD-3-Clause
// The operations in which functors are written. Each call is rounded once, to nearest even. The
// build uses -ffp-contract=off and -fmad=false, so a multiply-add is fused only where a functor
// calls `fma`.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/common/macros.h"

namespace torchfuse::kernels {

#if !defined(__CUDA_ARCH__) && !defined(__FMA__) && !defined(__ARM_FEATURE_FMA)
#define TORCHFUSE_EMULATED_FMA
#endif

#if defined(TORCHFUSE_EMULATED_FMA)
/// Returns a correctly rounded a * b + c without an FMA instruction. The product of two floats is
/// exact in double. The sum is rounded to odd in double, so that only the final rounding to float
/// matters (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms
/// using rounding to odd", 2008).
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

/// Returns the larger value. Returns NaN if either value is NaN, as torch.maximum does, and `b` if
/// both values are zeros, as MAXPS does. The last operation flushes denormals like all other
/// operations do; a plain selection would let denormals pass.
template <class T>
TORCHFUSE_HOST_DEVICE T max(T a, T b) {
  const T larger = (a != a || a > b) ? a : b;
#if defined(TORCHFUSE_EMULATED_FMA)
  // A compiler may see that the emulated fma changes nothing and remove it.
  return larger == T(0) ? larger * T(0) : larger;
#else
  return fma(larger, T(1), T(-0.0));
#endif
}

/// Returns 1 or -1, the zero `a`, or NaN if `a` is NaN. Where denormals are flushed they compare as
/// zeros, and the product, unlike `a`, is then a zero.
template <class T>
TORCHFUSE_HOST_DEVICE T sign(T a) {
  return a > T(0) ? T(1) : a < T(0) ? T(-1) : a * T(0);
}

/// Returns `value` if a ReLU of `gate` lets the gradient pass, as torch does: 0 if gate <= 0.
template <class T>
TORCHFUSE_HOST_DEVICE T pass_where_positive(T gate, T value) {
  return gate <= T(0) ? T(0) : value;
}

/// Rounds a number that was computed in fp64 to T. A denormal float becomes zero. A number that
/// rounds up to the smallest normal float is kept, as on x86 and in nvcc's code with -ftz=true.
/// aarch64 checks the number before rounding and would return zero.
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
/// m += (1 - beta) (g - m) is the most accurate form for a moment that decays slowly. With beta =
/// 0, as in GANs, the update should forget m completely, but in rounded arithmetic it does not: if
/// g is far below m, then g - m is -m, and the result is 0. A moment with beta = 0 is therefore
/// replaced by 0 first. On a GPU this choice only needs a predicate, and no operand stays alive
/// longer.
template <class T>
TORCHFUSE_HOST_DEVICE bool forgotten(T one_minus_beta) {
  return one_minus_beta == T(1);
}

struct Powers {
  double a;
  double b;
};

/// Returns a^exponent and b^exponent, for a and b below 1 and an integer exponent >= 0. Repeated
/// squaring gives identical bits on every device, which `pow` does not promise. On a GPU, one
/// thread computes the powers while its team waits: products of the two do not depend on each
/// other, and four bits take one branch. Squares beyond the last bit are not used.
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
