// SPDX-License-Identifier: BSD-3-Clause
// The stand-ins for the toolkit's 16-bit types against the kernels' own routines; in a CUDA build
// also the toolkit's own, as it computes them for the host and for cards before 8.0.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <bit>
#include <random>

#include "kernels/common/float16.h"

namespace torchfuse::kernels {
namespace {

bool equal(float a, float b) {
  return (a != a && b != b) || std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

TEST(Conversions, EveryEncodingWidensAlike) {
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const auto encoding = static_cast<std::uint16_t>(bits);
    ASSERT_TRUE(equal(__half2float(__ushort_as_half(encoding)), to_float(Half{encoding}))) << bits;
    ASSERT_TRUE(
        equal(__bfloat162float(__ushort_as_bfloat16(encoding)), to_float(BFloat16{encoding})))
        << bits;
  }
}

/// Every float whose low 13 bits are one of these stands at, or one step beside, a border between
/// two halves or two bfloat16s.
TEST(Conversions, FloatsAroundEveryBorderNarrowAlike) {
  for (std::uint32_t high = 0; high < 0x80000u; ++high) {
    for (const std::uint32_t low : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x1fffu}) {
      const float value = std::bit_cast<float>(high << 13 | low);
      if (value != value) continue;
      ASSERT_EQ(__half_as_ushort(__float2half_rn(value)), to_half(value).bits) << value;
      ASSERT_EQ(__bfloat16_as_ushort(__float2bfloat16_rn(value)), to_bfloat16(value).bits) << value;
    }
  }
}

TEST(Conversions, NotANumberStaysOne) {
  for (const std::uint32_t bits : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xffc12345u}) {
    const float value = std::bit_cast<float>(bits);
    EXPECT_NE(__half2float(__float2half_rn(value)), __half2float(__float2half_rn(value)));
    EXPECT_NE(__bfloat162float(__float2bfloat16_rn(value)),
              __bfloat162float(__float2bfloat16_rn(value)));
  }
}

TEST(Conversions, PairsAreInOrder) {
  EXPECT_EQ(__half2float(__floats2half2_rn(1, 2).x), 1.0f);
  EXPECT_EQ(__half2float(__floats2half2_rn(1, 2).y), 2.0f);
  EXPECT_EQ(__bfloat162float(__floats2bfloat162_rn(1, 2).x), 1.0f);
  EXPECT_EQ(__bfloat162float(__floats2bfloat162_rn(1, 2).y), 2.0f);
}

}  // namespace
}  // namespace torchfuse::kernels
