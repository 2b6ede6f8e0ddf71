// SPDX-License-Identifier: BSD-3-Clause
// An fp32 master as two halves: a bf16 parameter and 16 bits of remainder.
//
// Note [Parameter remainders]
// A bf16 is the upper half of an fp32, so a parameter together with 16 bits more is an fp32 master
// at half the memory: master = (param << 16) + remainder, in 32-bit integers, where the remainder
// is signed and reaches from -32768 to 32767. The parameter is the master rounded to nearest. A
// master that lies exactly between two bf16 values must be rounded away from zero, not to even:
// rounded down it would need a remainder of +32768, which 16 bits do not hold. Signs take no
// part in this: a float's lower 31 bits are its magnitude. A NaN is kept as the quiet NaN
// 0x7fc00000, or rounding could carry into the sign and show a zero. Every other master is
// restored bit for bit.
//
// A program may write to the parameter and leave the remainder. Beside a zero a negative remainder
// means nothing, nor does a positive one beside an infinity: no master splits into these pairs,
// and their sums, which would be NaN, are the only sums that are NaN beside another parameter. So
// where the sum is NaN the master is the parameter.
#pragma once

#include <cstdint>

#include "kernels/common/macros.h"

namespace torchfuse::kernels {

struct SplitMaster {
  std::uint16_t param;      ///< bits of a bf16
  std::uint16_t remainder;  ///< bits of a signed 16-bit integer
};

/// The bits of the master. See Note [Parameter remainders].
TORCHFUSE_HOST_DEVICE std::uint32_t join_master(SplitMaster halves) {
  const std::uint32_t param = static_cast<std::uint32_t>(halves.param) << 16;
  const std::uint32_t borrow = halves.remainder >> 15;
  const std::uint32_t sum = (param - (borrow << 16)) | halves.remainder;
  return (sum & 0x7fffffffu) > 0x7f800000u ? param : sum;
}

/// The halves of the master with these bits.
TORCHFUSE_HOST_DEVICE SplitMaster split_master(std::uint32_t bits) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) bits = 0x7fc00000u;
  return {static_cast<std::uint16_t>((bits + 0x8000u) >> 16), static_cast<std::uint16_t>(bits)};
}

}  // namespace torchfuse::kernels
