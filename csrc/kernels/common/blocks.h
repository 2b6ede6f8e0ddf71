// SPDX-License-Identifier: BSD-3-Clause
// How the rows of a list are dealt out to the blocks of a CUDA device.
//
// Note [CUDA chunks]
// A block handles one chunk of one tensor (or eight small tensors). Chunks of 16,384 elements keep
// start-up costs small; shorter lists get smaller chunks, so that several blocks per resident block
// remain and the last ones to finish do not leave the device idle.
//
// A tensor of up to kWarpElements elements gets a warp: up to eight such rows in sequence share one
// block. They come first, because they take long for their size, and the work of one row never
// depends on where in a table it stands.
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
  std::uint32_t blocks;         ///< so far
  std::uint32_t rows_in_block;  ///< small rows in the last one, 0 if it cannot take one

  void reset() {
    blocks = 0;
    rows_in_block = 0;
  }

  /// The first block of a row that is not empty.
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

/// The chunk for `total` elements: see Note [CUDA chunks].
inline std::uint32_t choose_chunk(std::int64_t total, std::uint32_t smallest) {
  constexpr std::int64_t kAimedBlocks = 4096;
  std::uint32_t chunk = kMaxChunk;
  while (chunk > smallest && total / chunk < kAimedBlocks) chunk /= 2;
  return chunk;
}

/// Calls visit(row index) for the rows that are not empty, small ones first, until one fails.
/// `from_the_end`: both kinds from the last to the first.
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
