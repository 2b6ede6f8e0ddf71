// SPDX-License-Identifier: BSD-3-Clause
// Distributes a list's rows over a CUDA device's blocks.
//
// Note [CUDA chunks]
// A block handles one chunk of one tensor, or eight small tensors. Chunks of 16,384 elements keep
// start-up costs small. Shorter lists get smaller chunks, so that there are several blocks per
// resident block and the last blocks do not leave the device idle.
//
// A tensor with at most kWarpElements elements gets a warp: up to eight consecutive small rows
// share a block. Small rows come first, because they are slow for their size. A row's position in a
// table never affects the work for the row.
#pragma once

#include <cstdint>

#include "kernels/common/macros.h"
#include "kernels/common/status.h"
#include "kernels/common/tensor_table.h"

namespace torchfuse::kernels::cuda {

constexpr std::uint32_t kThreads = 256;
constexpr std::uint32_t kWarpThreads = 32;
constexpr std::uint32_t kWarps = kThreads / kWarpThreads;
constexpr std::int64_t kWarpElements = 512;
constexpr std::uint32_t kMaxChunk = 16384;

TORCHFUSE_HOST_DEVICE constexpr bool fits_warp(std::int64_t numel) {
  return numel <= kWarpElements;
}

/// Numbers blocks, row after row.
struct BlockCounter {
  std::uint32_t blocks;  ///< number of blocks so far
  std::uint32_t
      rows_in_block;  ///< small rows in the last block; 0 if the block is not for small rows

  void reset() {
    blocks = 0;
    rows_in_block = 0;
  }

  /// Returns the first block of a non-empty row.
  std::uint32_t take(std::int64_t numel, std::uint32_t chunk) {
    if (fits_warp(numel)) {
      if (rows_in_block == 0 || rows_in_block == kWarps) {
        ++blocks;
        rows_in_block = 0;
      }
      ++rows_in_block;
      return blocks - 1;
    }
    const std::uint32_t first = blocks;
    // 2^31 blocks of the largest chunk are 2^45 elements: more than any device holds.
    blocks += static_cast<std::uint32_t>((numel + chunk - 1) / chunk);
    rows_in_block = 0;
    return first;
  }
};

/// Returns the chunk size for `total` elements: see Note [CUDA chunks].
inline std::uint32_t choose_chunk(std::int64_t total, std::uint32_t smallest) {
  constexpr std::int64_t kAimedBlocks = 4096;
  std::uint32_t chunk = kMaxChunk;
  while (chunk > smallest && total / chunk < kAimedBlocks) chunk /= 2;
  return chunk;
}

/// Calls visit(row index) for the non-empty rows, small rows first, until a call fails.
/// `from_the_end` visits both the small rows and the other rows from last to first.
template <class Visit>
Status for_each_row(const TensorTable& tensors, Visit visit, bool from_the_end = false) {
  for (const bool small : {true, false}) {
    for (std::int64_t k = 0; k < tensors.count; ++k) {
      const std::int64_t i = from_the_end ? tensors.count - 1 - k : k;
      const std::int64_t numel = tensors.rows[i].numel;
      if (numel == 0 || fits_warp(numel) != small) continue;
      const Status status = visit(i);
      if (!status.ok()) return status;
    }
  }
  return Status{};
}

}  // namespace torchfuse::kernels::cuda
