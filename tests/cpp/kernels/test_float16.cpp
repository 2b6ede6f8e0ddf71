// SPDX-License-Identifier: BSD-3-Clause
// Every 16-bit encoding, and every float near a rounding border, against independent routines.
#include "kernels/common/float16.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace torchfuse::kernels {
namespace {

/// The value of a half by the definition of the format.
double half_value(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 31) return mantissa != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

TEST(Half, WidensEveryEncodingExactly) {
  for (int bits = 0; bits < 65536; ++bits) {
    const auto half = Half{static_cast<std::uint16_t>(bits)};
    const double expected = half_value(half.bits);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(to_float(half))) << bits;
    } else {
      ASSERT_EQ(static_cast<double>(to_float(half)), expected) << bits;
      ASSERT_EQ(std::signbit(to_float(half)), (bits & 0x8000) != 0) << bits;
    }
  }
}

TEST(Half, NarrowsEveryEncodingBack) {
  for (int bits = 0; bits < 65536; ++bits) {
    const auto half = Half{static_cast<std::uint16_t>(bits)};
    if (std::isnan(to_float(half))) {
      EXPECT_TRUE(std::isnan(to_float(to_half(to_float(half)))));
    } else {
      ASSERT_EQ(to_half(to_float(half)).bits, half.bits) << bits;
    }
  }
}

TEST(Half, RoundsToNearestEvenBetweenNeighbors) {
  for (int bits = 0; bits < 0x7bff; ++bits) {
    const auto low = static_cast<std::uint16_t>(bits);
    const auto high = static_cast<std::uint16_t>(bits + 1);
    const double middle = (half_value(low) + half_value(high)) / 2;
    const float exact = static_cast<float>(middle);
    ASSERT_EQ(static_cast<double>(exact), middle);
    ASSERT_EQ(to_half(exact).bits, (low & 1) == 0 ? low : high) << bits;
    ASSERT_EQ(to_half(std::nextafterf(exact, 0.0f)).bits, low) << bits;
    ASSERT_EQ(to_half(std::nextafterf(exact, 1e9f)).bits, high) << bits;
    ASSERT_EQ(to_half(-exact).bits, to_half(exact).bits | 0x8000) << bits;
  }
}

TEST(Half, OverflowsToInfinityFrom65520) {
  EXPECT_EQ(to_half(std::nextafterf(65520.0f, 0.0f)).bits, 0x7bff);
  EXPECT_EQ(to_half(65520.0f).bits, 0x7c00);
  EXPECT_EQ(to_half(3e38f).bits, 0x7c00);
  EXPECT_EQ(to_half(-INFINITY).bits, 0xfc00);
}

TEST(BFloat16, WidensAndNarrowsEveryEncoding) {
  for (int bits = 0; bits < 65536; ++bits) {
    const auto value = BFloat16{static_cast<std::uint16_t>(bits)};
    const float wide = to_float(value);
    if (std::isnan(wide)) {
      EXPECT_TRUE(std::isnan(to_float(to_bfloat16(wide)))) << bits;
      continue;
    }
    ASSERT_EQ(float_bits(wide), static_cast<std::uint32_t>(bits) << 16);
    ASSERT_EQ(to_bfloat16(wide).bits, bits);
  }
}

TEST(BFloat16, RoundsToNearestEvenBetweenNeighbors) {
  for (std::uint32_t bits = 0; bits < 0x7f80; ++bits) {
    const float middle = bits_to_float((bits << 16) | 0x8000u);
    ASSERT_EQ(to_bfloat16(middle).bits, (bits & 1) == 0 ? bits : bits + 1) << bits;
    ASSERT_EQ(to_bfloat16(bits_to_float((bits << 16) | 0x7fffu)).bits, bits) << bits;
    ASSERT_EQ(to_bfloat16(bits_to_float((bits << 16) | 0x8001u)).bits, bits + 1) << bits;
  }
}

}  // namespace
}  // namespace torchfuse::kernels
