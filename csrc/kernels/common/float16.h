// SPDX-License-Identifier: BSD-3-Clause
// The 16-bit storage types and integer conversion routines with identical results under g++ and
// nvcc. SIMD and PTX instructions may replace a routine if a test has shown identical results for
// all encodings (except NaN payloads).
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/common/macros.h"

namespace torchfuse::kernels {

struct Half {
  std::uint16_t bits;
};

struct BFloat16 {
  std::uint16_t bits;
};

TORCHFUSE_HOST_DEVICE std::uint32_t float_bits(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

TORCHFUSE_HOST_DEVICE float bits_to_float(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

TORCHFUSE_HOST_DEVICE float to_float(BFloat16 value) {
  return bits_to_float(static_cast<std::uint32_t>(value.bits) << 16);
}

/// Round to nearest even; a NaN becomes the quiet NaN 0x7fc0.
TORCHFUSE_HOST_DEVICE BFloat16 to_bfloat16(float value) {
  const std::uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return BFloat16{0x7fc0};
  const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return BFloat16{static_cast<std::uint16_t>(rounded >> 16)};
}

TORCHFUSE_HOST_DEVICE float to_float(Half value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  std::uint32_t exponent = (value.bits >> 10) & 0x1fu;
  std::uint32_t mantissa = value.bits & 0x3ffu;
  if (exponent == 31) return bits_to_float(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    if (mantissa == 0) return bits_to_float(sign);
    // A subnormal half is a normal float: shift the leading one into the implicit position.
    exponent = 1;
    while ((mantissa & 0x400u) == 0) {
      mantissa <<= 1;
      --exponent;
    }
    mantissa &= 0x3ffu;
  }
  return bits_to_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

/// Round to nearest even with subnormal results; values past 65,520 become infinite.
TORCHFUSE_HOST_DEVICE Half to_half(float value) {
  const std::uint32_t bits = float_bits(value);
  const std::uint16_t sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return Half{static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return Half{static_cast<std::uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x33000001u) return Half{sign};
  const std::uint32_t exponent = magnitude >> 23;
  std::uint32_t mantissa = magnitude & 0x7fffffu;
  std::uint32_t shift = 13;
  std::uint32_t base = 0;
  if (exponent < 113) {
    mantissa |= 0x800000u;
    shift = 126 - exponent;
  } else {
    base = (exponent - 112) << 10;
  }
  const std::uint32_t half_ulp = 1u << (shift - 1);
  const std::uint32_t kept = mantissa >> shift;
  const std::uint32_t rest = mantissa & ((1u << shift) - 1);
  const std::uint32_t round_up = (rest > half_ulp || (rest == half_ulp && (kept & 1u))) ? 1u : 0u;
  return Half{static_cast<std::uint16_t>(sign | (base + kept + round_up))};
}

}  // namespace torchfuse::kernels
