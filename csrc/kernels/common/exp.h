// SPDX-License-Identifier: BSD-3-Clause
// The exponential of numbers up to 0, in the operations of common/math.h: the same bits on every
// device and at every vector width.
//
// Note [Exponential]
// exp(x) = 2^n * exp(r) with n = x / log(2), rounded, and r = x - n * log(2), at most log(2) / 2. n
// is rounded by adding a number so large that nothing behind the point is left; the sum's last bits
// are n. They are added to the exponent of a Taylor polynomial of exp(r), whose error is below 0.1
// units in the last place. log(2) is subtracted in two parts, the first of which has so many zeros
// at its end that its product with n is exact.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/common/macros.h"
#include "kernels/common/math.h"

namespace torchfuse::kernels {

/// x * 2^n, where `shifted` is n + 1.5 * 2^23 (2^52 in fp64), as ExpConstants::kShift makes it.
TORCHFUSE_HOST_DEVICE float times_power_of_two(float x, float shifted) {
  std::uint32_t bits;
  std::uint32_t exponent;
  memcpy(&bits, &x, sizeof bits);
  memcpy(&exponent, &shifted, sizeof exponent);
  bits += exponent << 23;
  memcpy(&x, &bits, sizeof x);
  return x;
}
TORCHFUSE_HOST_DEVICE double times_power_of_two(double x, double shifted) {
  std::uint64_t bits;
  std::uint64_t exponent;
  memcpy(&bits, &x, sizeof bits);
  memcpy(&exponent, &shifted, sizeof exponent);
  bits += exponent << 52;
  memcpy(&x, &bits, sizeof x);
  return x;
}

template <class T>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  static constexpr float kLeast = -87.0f;  ///< below it results would not be normal
  static constexpr float kShift = 0x1.8p23f;
  static constexpr float kLog2High = 0x1.62e4p-1f;
  static constexpr float kLog2Low = 0x1.7f7d1cp-20f;
  static constexpr int kDegree = 7;
};
template <>
struct ExpConstants<double> {
  static constexpr double kLeast = -708.0;
  static constexpr double kShift = 0x1.8p52;
  static constexpr double kLog2High = 0x1.62e42fefa38p-1;
  static constexpr double kLog2Low = 0x1.ef35793c7673p-45;
  static constexpr int kDegree = 13;
};

/// 1 / k!.
template <int k>
constexpr double kInverseFactorial = kInverseFactorial<k - 1> / k;
template <>
inline constexpr double kInverseFactorial<0> = 1.0;

/// The sum of r^i / i! over i from k on, divided by r^k.
template <int k, class T, class V>
TORCHFUSE_HOST_DEVICE V taylor_of_exp(V r) {
  const V coefficient(static_cast<T>(kInverseFactorial<k>));
  if constexpr (k == ExpConstants<T>::kDegree) {
    return coefficient;
  } else {
    return fma(taylor_of_exp<k + 1, T>(r), r, coefficient);
  }
}

/// exp(x) for x <= 0: 0 from ExpConstants<T>::kLeast down, NaN for NaN. V: T or a vector of T. See
/// Note [Exponential].
template <class T, class V>
TORCHFUSE_HOST_DEVICE V exp_of_negative(V x) {
  using Constants = ExpConstants<T>;
  const V least(Constants::kLeast);
  const V kept = max(x, least);
  const V shifted = fma(kept, V(static_cast<T>(1.4426950408889634)), V(Constants::kShift));
  const V n = shifted - V(Constants::kShift);
  V r = fma(n, V(-Constants::kLog2High), kept);
  r = fma(n, V(-Constants::kLog2Low), r);
  // The exponent of a NaN is no number to add to: n - n is NaN then, and else 0.
  return pass_where_positive(x - least,
                             times_power_of_two(taylor_of_exp<0, T>(r), shifted) + (n - n));
}

}  // namespace torchfuse::kernels
