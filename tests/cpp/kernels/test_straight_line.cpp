// SPDX-License-Identifier: BSD-3-Clause
// Against the processor's own division and square root, which are correctly rounded.
#include "kernels/cuda/straight_line.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace torchfuse::kernels::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::uint32_t kOne = 127u << 23;

/// Returns the float `steps` after a positive one.
float after(float x, int steps) {
  return bits_to_float(float_bits(x) + static_cast<std::uint32_t>(steps));
}

/// Returns a number of at least 1 and below 2.
float significand(std::mt19937& random) { return bits_to_float(kOne | (random() & 0x7fffffu)); }

TEST(StraightLine, EveryRootIsCorrectlyRounded) {
  for (std::uint32_t bits = kOne; bits < kOne + (2u << 23); ++bits) {
    const float x = bits_to_float(bits);  // from 1 to 4: others differ by powers of 4
    const auto inverse = static_cast<float>(1.0 / std::sqrt(static_cast<double>(x)));
    ASSERT_EQ(sqrt_from(inverse, x), std::sqrt(x)) << x;
  }
}

TEST(StraightLine, RootsAreExactAtTheEndsOfTheUsualRange) {
  for (const float x : {0.0f, kLeastRoot, after(kLeastRoot, 1), 0x1.fffffep127f}) {
    ASSERT_TRUE(has_usual_sqrt(x)) << x;
    const float inverse = approximate_inverse_sqrt(std::fmax(x, kLeastRoot));
    EXPECT_EQ(float_bits(sqrt_from(inverse, x)), float_bits(std::sqrt(x))) << x;
  }
}

TEST(StraightLine, OtherRootsAreUnusual) {
  for (const float x :
       {-0.0f, -1.0f, 0x1p-149f, after(kLeastRoot, -1), kInfinity, -kInfinity, NAN}) {
    EXPECT_FALSE(has_usual_sqrt(x)) << x;
  }
}

TEST(StraightLine, QuotientsAreCorrectlyRounded) {
  std::mt19937 random(1);
  for (int i = 0; i < 10000000; ++i) {
    const float a = significand(random);
    const float b = significand(random);
    ASSERT_EQ(quotient_from(1.0f / b, a, b), a / b) << a << ' ' << b;
  }
}

/// Returns the inverse of an odd number modulo 2^25.
std::uint32_t inverse_of(std::uint32_t odd) {
  std::uint32_t inverse = odd;  // right modulo 2^3; each step doubles the bits
  for (int step = 0; step < 4; ++step) inverse *= 2 - odd * inverse;
  return inverse & 0x1ffffffu;
}

// 2^25 a = b m + r for an odd m of 25 bits, which is the middle of two quotients, and a small r: a
// / b is as near to the middle as a quotient can be.
TEST(StraightLine, QuotientsNearTheMiddleOfTwoFloatsAreCorrectlyRounded) {
  std::mt19937 random(2);
  int found = 0;
  for (int i = 0; i < 4000000; ++i) {
    const std::uint32_t middle = 0x1000000u | (random() & 0xffffffu) | 1u;
    const auto r = static_cast<std::int32_t>(random() % 15) - 7;
    const std::uint32_t b = (0u - static_cast<std::uint32_t>(r)) * inverse_of(middle) & 0x1ffffffu;
    if (b < 0x800000u || b > 0xffffffu) continue;
    const std::int64_t product = static_cast<std::int64_t>(b) * middle + r;
    const std::int64_t a = product >> 25;
    ASSERT_EQ(a << 25, product);
    if (a < 0x800000 || a > 0xffffff) continue;
    const auto dividend = static_cast<float>(a);
    const auto divisor = static_cast<float>(b);
    ASSERT_EQ(quotient_from(1.0f / divisor, dividend, divisor), dividend / divisor)
        << a << ' ' << b;
    ++found;
  }
  EXPECT_GT(found, 100000);
}

/// Whether all signs of a usual quotient come out, and no unusual one passes for a usual one.
TEST(StraightLine, UsualQuotientsAreTheProcessorsForAllMagnitudes) {
  const std::vector<float> magnitudes{
      0.0f,      0x1p-149f, 0x1p-126f, after(0x1p-78f, -1), 0x1p-78f, 0x1.8p-50f, 0x1.4p-10f,
      1.0f,      3.0f,      0x1p46f,   after(0x1p46f, 1),   0x1p80f,  0x1p126f,   0x1.fffffep127f,
      kInfinity, NAN};
  int usual = 0;
  for (const float a_magnitude : magnitudes) {
    for (const float b_magnitude : magnitudes) {
      for (const float a : {a_magnitude, -a_magnitude}) {
        for (const float b : {b_magnitude, -b_magnitude}) {
          const float quotient = quotient_from(approximate_reciprocal(b), a, b);
          if (!is_usual_quotient(a, b, quotient)) continue;
          EXPECT_EQ(float_bits(quotient), float_bits(a / b)) << a << " / " << b;
          ++usual;
        }
      }
    }
  }
  EXPECT_GT(usual, 100);
}

TEST(StraightLine, QuotientsOfAdamAreUsual) {
  for (const float a : {0.0f, -0.0f, 0x1p-78f, 1e-6f, -1.0f, 1e6f}) {
    for (const float b : {1e-8f, 1e-3f, 1.0f, 1e6f}) {
      const float quotient = quotient_from(approximate_reciprocal(b), a, b);
      EXPECT_TRUE(is_usual_quotient(a, b, quotient)) << a << " / " << b;
    }
  }
}

}  // namespace
}  // namespace torchfuse::kernels::cuda
