// SPDX-License-Identifier: BSD-3-Clause
// How many instructions the fused update should access memory with.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kernels/cuda/alignment.h"

namespace torchfuse::kernels::testing {

/// Load and store instructions.
struct Traffic {
  std::size_t loads = 0;
  std::size_t stores = 0;
};

/// Elements per chunk of a list of `total`: at least one vector for each of 256 threads, and 4,096
/// chunks where there are so many. See Note [CUDA chunks].
inline std::int64_t chunk_of(std::int64_t total, std::int64_t vec) {
  std::int64_t chunk = 256 * vec;
  while (chunk < 16384 && total / (2 * chunk) >= 4096) chunk *= 2;
  return chunk;
}

/// Loads, or stores, of one of a tensor's streams: vectors in accesses of the width that the
/// stream's address allows behind the head, the other elements one by one. See Note [Peeling].
inline std::size_t instructions_of(const cuda::OperandAccess& stream,
                                   const std::vector<cuda::OperandAccess>& all, std::int64_t numel,
                                   std::int64_t chunk, std::int64_t vec) {
  const std::int64_t head =
      cuda::best_peeling(all.data(), static_cast<int>(all.size()), static_cast<std::uint32_t>(vec))
          .head;
  const std::int64_t size = stream.element_size;
  const std::int64_t width =
      std::gcd(static_cast<std::int64_t>(stream.address) + head * size, std::int64_t{16});
  std::int64_t instructions = 0;
  for (std::int64_t begin = 0; begin < numel; begin += chunk) {
    const std::int64_t count = std::min(chunk, numel - begin);
    const std::int64_t vectors = std::max<std::int64_t>(count - head, 0) / vec;
    instructions += vectors * (vec * size / width) + (count - vectors * vec);
  }
  return static_cast<std::size_t>(instructions);
}

}  // namespace torchfuse::kernels::testing
