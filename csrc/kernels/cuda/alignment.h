// SPDX-License-Identifier: BSD-3-Clause
// Determines which accesses are legal for the addresses of a tensor's operands.
//
// Note [Peeling]
// Kernels handle vectors of elements with 16-byte accesses. If operands are not 16-byte aligned, a
// few elements at the head of each chunk are handled one by one. The head's length is chosen so
// that the following vectors need the fewest memory instructions over all operands; a stored
// operand counts twice. After the head, an operand may still not be aligned (for example a gradient
// in a bucket). Such an operand is accessed with the widest power of two that the address allows.
// Chunks are multiples of 16 bytes in every operand, so a tensor's chunks all have the same head
// length. Addresses are multiples of the element size.
#pragma once

#include <cstdint>

#include "kernels/common/macros.h"

namespace torchfuse::kernels::cuda {

constexpr std::uint32_t kVectorBytes = 16;

/// Returns the widest access that `address` allows: a power of two, at most 16 bytes.
TORCHFUSE_HOST_DEVICE std::uint32_t legal_width(std::uintptr_t address) {
  const std::uint32_t low = static_cast<std::uint32_t>(address) | kVectorBytes;
  return low & (~low + 1u);
}

struct OperandAccess {
  std::uintptr_t address = 0;
  std::uint32_t element_size = 4;
  std::uint32_t uses = 1;  ///< 2 for an operand that is loaded and stored
};

struct Peeling {
  std::uint32_t head = 0;
  bool aligned = true;  ///< after the head, all operands allow 16-byte accesses
};

/// Returns how many elements to peel so that vectors of `vec` elements cost the fewest memory
/// instructions. See Note [Peeling].
inline Peeling best_peeling(const OperandAccess* operands, int count, std::uint32_t vec) {
  std::uintptr_t low_bits = 0;
  for (int s = 0; s < count; ++s) low_bits |= operands[s].address;
  if (legal_width(low_bits) == kVectorBytes) return Peeling{};
  Peeling best;
  std::uint32_t best_cost = ~0u;
  for (std::uint32_t head = 0; head < vec; ++head) {
    std::uint32_t cost = 0;
    bool aligned = true;
    for (int s = 0; s < count; ++s) {
      const std::uint32_t size = operands[s].element_size;
      const std::uint32_t width = legal_width(operands[s].address + head * size);
      cost += operands[s].uses * vec * size / width;
      aligned = aligned && width == kVectorBytes;
    }
    if (cost < best_cost) {
      best_cost = cost;
      best = {head, aligned};
    }
  }
  return best;
}

}  // namespace torchfuse::kernels::cuda
