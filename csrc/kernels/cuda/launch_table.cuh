// SPDX-License-Identifier: BSD-3-Clause
// How one launch covers many tensors of any size.
//
// Note [Launch tables]
// All that a launch needs to know about its tensors is passed by value in the kernel's arguments:
// no device memory, no copy, nothing that a captured graph could find changed. Lists longer than
// the argument limit take several launches. Block b finds its tensor by binary search over
// `first_block`, which holds the first block of each row. A tensor of up to kWarpElements elements
// gets a warp: up to eight such rows in sequence share one block. They come first in a launch,
// because they take long for their size, and the work of one row never depends on where in the
// table it stands.
//
// Note [CUDA chunks]
// A block handles one chunk of one tensor (or eight small tensors). Chunks of 16,384 elements keep
// start-up costs small; shorter lists get smaller chunks, so that several blocks per resident block
// remain and the last ones to finish do not leave the device idle.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/common/status.h"
#include "kernels/common/tensor_table.h"
#include "kernels/cuda/launch.cuh"

namespace torchfuse::kernels::cuda {

constexpr std::uint32_t kThreads = 256;
constexpr std::uint32_t kWarpThreads = 32;
constexpr std::uint32_t kWarps = kThreads / kWarpThreads;
constexpr std::int64_t kWarpElements = 512;
constexpr std::uint32_t kMaxChunk = 16384;

/// Rows that fit beside `fixed_bytes` of other arguments; 32 bytes are kept for counts and padding.
constexpr int table_capacity(std::size_t bytes_per_row, std::size_t fixed_bytes) {
  return static_cast<int>((kMaxArgumentBytes - fixed_bytes - 32) /
                          (bytes_per_row + sizeof(std::uint32_t)));
}

TORCHFUSE_HOST_DEVICE constexpr bool fits_warp(std::int64_t numel) {
  return numel <= kWarpElements;
}

/// `Row` is any plain struct with a member `numel`.
template <class Row, int kCapacity>
struct LaunchTable {
  Row rows[kCapacity];
  std::uint32_t first_block[kCapacity];
  std::int32_t count;
  std::uint32_t chunk;          ///< elements
  std::uint32_t blocks;         ///< the grid
  std::uint32_t rows_in_block;  ///< small rows in the last block so far, 0 if it cannot take one

  void reset(std::uint32_t chunk_elements) {
    count = 0;
    chunk = chunk_elements;
    blocks = 0;
    rows_in_block = 0;
  }

  bool full() const { return count == kCapacity; }

  /// Appends a row that is not empty and returns its index.
  int append(const Row& row) {
    if (fits_warp(row.numel)) {
      if (rows_in_block == 0 || rows_in_block == kWarps) {
        ++blocks;
        rows_in_block = 0;
      }
      ++rows_in_block;
      first_block[count] = blocks - 1;
    } else {
      first_block[count] = blocks;
      // 2^31 blocks of the largest chunk are 2^45 elements: more than any device holds.
      blocks += static_cast<std::uint32_t>((row.numel + chunk - 1) / chunk);
      rows_in_block = 0;
    }
    rows[count] = row;
    return count++;
  }
};

/// What the calling thread has to do: elements [begin, begin + count) of a row, together with the
/// `size` threads of its team, of which it is number `rank`.
struct RowShare {
  int row;  ///< negative: nothing, but barriers must still be reached
  std::uint32_t team;
  std::uint32_t rank;
  std::uint32_t size;
  std::uint32_t count;
  std::uint32_t chunk_index;
  std::int64_t begin;
};

/// `from_the_end`: the blocks of a row take its chunks from the last to the first.
template <class Row, int kCapacity>
__device__ __forceinline__ RowShare row_share(const LaunchTable<Row, kCapacity>& table,
                                              bool from_the_end = false) {
  int row = 0;
  int high = table.count;
  while (high - row > 1) {
    const int middle = (row + high) / 2;
    if (table.first_block[middle] <= blockIdx.x) {
      row = middle;
    } else {
      high = middle;
    }
  }
  RowShare share;
  if (fits_warp(table.rows[row].numel)) {
    // The search ends at the last row of the block; warp w takes the w-th before it.
    share.team = threadIdx.x / kWarpThreads;
    share.rank = threadIdx.x % kWarpThreads;
    share.size = kWarpThreads;
    share.row = row - static_cast<int>(share.team);
    share.chunk_index = 0;
    share.begin = 0;
    share.count = 0;
    if (share.row >= 0 && table.first_block[share.row] == blockIdx.x) {
      share.count = static_cast<std::uint32_t>(table.rows[share.row].numel);
    } else {
      share.row = -1;
    }
    return share;
  }
  share.team = 0;
  share.rank = threadIdx.x;
  share.size = kThreads;
  share.row = row;
  share.chunk_index = blockIdx.x - table.first_block[row];
  if (from_the_end) {
    const std::uint32_t end = high < table.count ? table.first_block[high] : table.blocks;
    share.chunk_index = end - 1 - blockIdx.x;
  }
  share.begin = static_cast<std::int64_t>(share.chunk_index) * table.chunk;
  const std::int64_t rest = table.rows[row].numel - share.begin;
  share.count = rest < table.chunk ? static_cast<std::uint32_t>(rest) : table.chunk;
  return share;
}

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
