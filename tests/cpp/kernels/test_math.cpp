// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/common/math.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "kernels/common/float16.h"
#include "kernels/cpu/flush_denormals.h"

namespace torchfuse::kernels {
namespace {

// This file is compiled without -mfma, so `fma` is the emulation that the baseline level uses on
// x86-64.
TEST(Fma, EmulationRoundsOnceForRandomBits) {
  std::mt19937 random(1);
  std::int64_t compared = 0;
  for (int i = 0; i < 2000000; ++i) {
    const float a = bits_to_float(random());
    const float b = bits_to_float(random());
    const float c = bits_to_float(random());
    const float expected = std::fmaf(a, b, c);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(fma(a, b, c)));
      continue;
    }
    // Denormal results are flushed by the kernels, so their last bit is not promised.
    if (std::fabs(expected) < 0x1p-126f && expected != 0.0f) continue;
    ASSERT_EQ(float_bits(fma(a, b, c)), float_bits(expected)) << a << ' ' << b << ' ' << c;
    ++compared;
  }
  EXPECT_GT(compared, 1000000);
}

TEST(Fma, EmulationRoundsOnceNearTies) {
  std::mt19937 random(2);
  for (int i = 0; i < 2000000; ++i) {
    // Similar magnitudes, where a second rounding would show.
    const float a = 1.0f + static_cast<float>(random() & 0x7fffff) * 0x1p-23f;
    const float b = 1.0f + static_cast<float>(random() & 0xfff) * 0x1p-12f;
    const float c = std::ldexp(1.0f + static_cast<float>(random() & 0x7fffff) * 0x1p-23f,
                               static_cast<int>(random() % 60) - 30) *
                    ((random() & 1) != 0 ? 1.0f : -1.0f);
    ASSERT_EQ(float_bits(fma(a, b, c)), float_bits(std::fmaf(a, b, c)))
        << a << ' ' << b << ' ' << c;
  }
}

constexpr double kBases[] = {0.0, 0.9, 0.99, 0.999, 0.95, 0.5};

/// As it is defined: one bit after the other, from the lowest on.
double squared_repeatedly(double base, std::uint64_t exponent) {
  double result = 1.0;
  for (; exponent != 0; exponent >>= 1) {
    if (exponent % 2 != 0) result *= base;
    base *= base;
  }
  return result;
}

TEST(IntegerPowers, HaveTheBitsOfRepeatedSquaring) {
  std::vector<std::uint64_t> exponents{(1u << 24) - 1, 1u << 24, std::uint64_t{1} << 40};
  for (std::uint64_t exponent = 0; exponent < 1100; ++exponent) exponents.push_back(exponent);
  for (const double a : kBases) {
    for (const double b : kBases) {
      for (const std::uint64_t exponent : exponents) {
        const Powers powers = integer_powers(a, b, static_cast<double>(exponent));
        ASSERT_EQ(powers.a, squared_repeatedly(a, exponent)) << a << '^' << exponent;
        ASSERT_EQ(powers.b, squared_repeatedly(b, exponent)) << b << '^' << exponent;
      }
    }
  }
}

TEST(RoundTo, IsAZeroBelowWhatRoundsToTheSmallestNormalFloatWhereverDenormalsGo) {
  const double half_way = 0x1p-126 * (1.0 - 0x1p-25);
  const double below = std::nextafter(half_way, 0.0);
  for (const bool flush : {false, true}) {
    std::optional<cpu::FlushDenormals> flushed;
    if (flush) flushed.emplace();
    std::vector<std::uint32_t> bits;
    for (const double x : {below, -below, 0x1p-130, -0.0, half_way, -half_way,
                           std::nextafter(0x1p-126, 0.0), 0x1p-126, -0x1p-126}) {
      bits.push_back(float_bits(kernels::round_to<float>(x)));
    }
    flushed.reset();
    const std::vector<std::uint32_t> expected = {0,           0x80000000u, 0,
                                                 0x80000000u, 0x00800000u, 0x80800000u,
                                                 0x00800000u, 0x00800000u, 0x80800000u};
    EXPECT_EQ(bits, expected) << flush;
  }
}

TEST(RoundTo, IsTheNearestNumberElsewhere) {
  for (const double x : {1.0 / 3.0, -0.1, 1e-30, 3.4e38, 1e39, -HUGE_VAL}) {
    EXPECT_EQ(kernels::round_to<float>(x), static_cast<float>(x));
    EXPECT_EQ(kernels::round_to<double>(x), x);
  }
  EXPECT_EQ(kernels::round_to<double>(0x1p-130), 0x1p-130);
  EXPECT_TRUE(std::isnan(kernels::round_to<float>(NAN)));
}

TEST(Max, PropagatesNan) {
  EXPECT_EQ(kernels::max(1.0f, 2.0f), 2.0f);
  EXPECT_EQ(kernels::max(2.0f, 1.0f), 2.0f);
  EXPECT_TRUE(std::isnan(kernels::max(NAN, 1.0f)));
  EXPECT_TRUE(std::isnan(kernels::max(1.0f, NAN)));
}

TEST(Max, TakesTheSecondOfTwoZerosAsTheVectorInstructionDoes) {
  EXPECT_EQ(float_bits(kernels::max(0.0f, -0.0f)), 0x80000000u);
  EXPECT_EQ(float_bits(kernels::max(-0.0f, 0.0f)), 0u);
}

TEST(Sign, IsOneOrMinusOneOrTheZeroOrNanItself) {
  EXPECT_EQ(kernels::sign(0x1p-126f), 1.0f);
  EXPECT_EQ(kernels::sign(-INFINITY), -1.0f);
  EXPECT_EQ(kernels::sign(-3.0), -1.0);
  EXPECT_EQ(float_bits(kernels::sign(0.0f)), 0u);
  EXPECT_EQ(float_bits(kernels::sign(-0.0f)), 0x80000000u);
  EXPECT_TRUE(std::isnan(kernels::sign(NAN)));
}

TEST(Sign, TakesDenormalsForZeroWhereTheyAreFlushed) {
  volatile float minus_tiny = -0x1p-130f;
  EXPECT_EQ(kernels::sign(minus_tiny), -1.0f);
  volatile float flushed;
  {
    const cpu::FlushDenormals flush;
    flushed = kernels::sign(minus_tiny);
  }
  EXPECT_EQ(float_bits(flushed), 0x80000000u);
}

TEST(Max, FlushesDenormalsWhereTheyAreFlushed) {
  volatile float tiny = 0x1p-130f;
  volatile float minus_tiny = -0x1p-140f;
  EXPECT_EQ(kernels::max(tiny, minus_tiny), 0x1p-130f);
  volatile float positive;
  volatile float negative;
  {
    const cpu::FlushDenormals flush;
    positive = kernels::max(minus_tiny, tiny);
    negative = kernels::max(tiny, minus_tiny);
  }
  EXPECT_EQ(float_bits(positive), 0u);
  EXPECT_EQ(float_bits(negative), 0x80000000u);
}

}  // namespace
}  // namespace torchfuse::kernels
