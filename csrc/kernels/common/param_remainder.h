// SPDX-License-Identifier: BSD-3-Clause
// Stores an fp32 master as two halves: a bf16 parameter and a 16-bit remainder.
//
// Note [Parameter remainders]
// A bf16 is the upper half of an fp32, so a parameter and 16 additional bits form an fp32 master at
// half the memory: master = (param << 16) + remainder, in 32-bit integers. The remainder is signed,
// from -32768 to 32767. The parameter is the master rounded to nearest. A master halfway between
// two bf16 values must be rounded away from zero, not to even: rounding down would need a remainder
// of +32768, which does not fit 16 bits. Signs do not matter, because a float's lower 31 bits are
// its magnitude. A NaN is stored as the quiet NaN 0x7fc00000, because rounding could otherwise
// carry into the sign and produce a zero. Every other master is restored bit for bit.
//
// A program may write to the parameter and leave the remainder unchanged. A negative remainder
// beside a zero, and a positive remainder beside an infinity, represent no master. In these cases,
// and in no other case with a parameter that is not NaN, the sum is NaN. Therefore, if the sum is
// NaN, the master is the parameter.
#pragma once

#include <cstdint>

#include "kernels/common/macros.h"

namespace torchfuse::kernels {

struct SplitMaster {
  std::uint16_t param;      ///< bits of a bf16
  std::uint16_t remainder;  ///< bits of a signed 16-bit integer
};

/// Returns the master's bits. See Note [Parameter remainders].
TORCHFUSE_HOST_DEVICE std::uint32_t join_master(SplitMaster halves) {
  const std::uint32_t param = static_cast<std::uint32_t>(halves.param) << 16;
  const std::uint32_t borrow = halves.remainder >> 15;
  const std::uint32_t sum = (param - (borrow << 16)) | halves.remainder;
  return (sum & 0x7fffffffu) > 0x7f800000u ? param : sum;
}

/// Returns the halves of a master with these bits.
TORCHFUSE_HOST_DEVICE SplitMaster split_master(std::uint32_t bits) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0x7fc00000u;
  return {static_cast<std::uint16_t>((bits + 0x8000u) >> 16), static_cast<std::uint16_t>(bits)};
}

}  // namespace torchfuse::kernels
