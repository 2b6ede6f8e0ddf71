// SPDX-License-Identifier: BSD-3-Clause
// The exponential of numbers up to 0, in the operations of common/math.h: the same bits on every
// device and at every vector width.
//
// Note [Exponential]
// exp(x) = 2^n * exp(r) with n = x / log(2), rounded, and r = x - n * log(2), at most log(2) / 2.
// Adding a large number rounds n to an integer: the last bits of the sum are n, and they become the
// exponent of 2^n. A Taylor polynomial approximates exp(r), with an error below 0.1 units in the
// last place. log(2) is subtracted in two parts. The first part ends in so many zeros that its
// product with n is exact.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/common/macros.h"
#include "kernels/common/math.h"

namespace torchfuse::kernels {

/// 2^n, where `shifted` is n + 1.5 * 2^23 (2^52 in fp64), as ExpConstants::kShift makes it.
TORCHFUSE_HOST_DEVICE float power_of_two(float shifted) {
  std::uint32_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + (127u << 23);
  float power;
  memcpy(&power, &bits, sizeof power);
  return power;
}
TORCHFUSE_HOST_DEVICE double power_of_two(double shifted) {
  std::uint64_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 52) + (std::uint64_t{1023} << 52);
  double power;
  memcpy(&power, &bits, sizeof power);
  return power;
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

/// exp(x) for ExpConstants<T>::kLeast <= x <= 0, NaN for NaN. V: T or a vector of T. See
/// Note [Exponential].
template <class T, class V>
TORCHFUSE_HOST_DEVICE V exp_in_range(V x) {
  using Constants = ExpConstants<T>;
  const V shifted = fma(x, V(static_cast<T>(1.4426950408889634)), V(Constants::kShift));
  const V n = shifted - V(Constants::kShift);
  V r = fma(n, V(-Constants::kLog2High), x);
  r = fma(n, V(-Constants::kLog2Low), r);
  return taylor_of_exp<0, T>(r) * power_of_two(shifted);
}

/// exp(x) for x <= 0: 0 from ExpConstants<T>::kLeast down, NaN for NaN.
template <class T, class V>
TORCHFUSE_HOST_DEVICE V exp_of_negative(V x) {
  return pass_where_positive(x - V(ExpConstants<T>::kLeast), exp_in_range<T>(x));
}

}  // namespace torchfuse::kernels
