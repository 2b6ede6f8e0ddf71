// SPDX-License-Identifier: BSD-3-Clause
// Lets one launch cover many tensors of any size.
//
// Note [Launch tables]
// A launch passes all data about its tensors by value, in the kernel's arguments. The launch needs
// no device memory and no copy, and nothing can change under a captured graph. Lists longer than
// the argument limit need several launches, unless the rows are kept on the device: see Note
// [Device tables]. Block b finds its tensor by binary search in `first_block`, which contains each
// row's first block.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/common/blocks.h"
#include "kernels/cuda/launch.cuh"

namespace torchfuse::kernels::cuda {

/// Returns how many rows fit into `bytes` of arguments, beside `fixed_bytes` of others. 32 bytes
/// are reserved for counts and padding.
constexpr int table_capacity(std::size_t bytes_per_row, std::size_t fixed_bytes,
                             std::size_t bytes = kMaxArgumentBytes) {
  return static_cast<int>((bytes - fixed_bytes - 32) / (bytes_per_row + sizeof(std::uint32_t)));
}

/// A table of rows in a launch's arguments. `Row` is any plain struct with a member `numel`.
template <class Row, int kCapacity>
struct LaunchTable {
  Row rows[kCapacity];
  std::uint32_t first_block[kCapacity];
  std::int32_t count;
  std::uint32_t chunk;  ///< elements per chunk
  BlockCounter counter;

  void reset(std::uint32_t chunk_elements) {
    count = 0;
    chunk = chunk_elements;
    counter.reset();
  }

  bool full() const { return count == kCapacity; }
  std::uint32_t blocks() const { return counter.blocks; }

  /// Appends a non-empty row and returns its index.
  int append(const Row& row) {
    first_block[count] = counter.take(row.numel, chunk);
    rows[count] = row;
    return count++;
  }

  /// Returns the last row of which the calling block handles elements.
  __device__ __forceinline__ int last_row_here() const {
    int row = 0;
    int high = count;
    while (high - row > 1) {
      const int middle = (row + high) / 2;
      if (first_block[middle] <= blockIdx.x) {
        row = middle;
      } else {
        high = middle;
      }
    }
    return row;
  }
  __device__ __forceinline__ std::int64_t numel(int row) const { return rows[row].numel; }
  /// Returns the calling block's index among the row's blocks.
  __device__ __forceinline__ std::uint32_t block_in(int row) const {
    return blockIdx.x - first_block[row];
  }
  /// Returns how many of the row's blocks come after the calling block.
  __device__ __forceinline__ std::uint32_t blocks_behind(int row) const {
    const std::uint32_t end = row + 1 < count ? first_block[row + 1] : counter.blocks;
    return end - 1 - blockIdx.x;
  }
};

/// The calling thread's work: elements [begin, begin + count) of a row. `size` threads form a team
/// for these elements, and `rank` is the thread's number in the team.
struct RowShare {
  int row;  ///< negative: no work, but the thread must reach barriers
  std::uint32_t team;
  std::uint32_t rank;
  std::uint32_t size;
  std::uint32_t count;
  std::uint32_t chunk_index;
  std::int64_t begin;
};

/// Returns the calling thread's share of a launch's rows. `Rows` is a launch table or has the same
/// functions. `from_the_end`: a row's blocks process its chunks from last to first.
template <class Rows>
__device__ __forceinline__ RowShare row_share(const Rows& rows, bool from_the_end = false) {
  const int row = rows.last_row_here();
  RowShare share;
  if (fits_warp(rows.numel(row))) {
    // Warp w handles the w-th row before the block's last row.
    share.team = threadIdx.x / kWarpThreads;
    share.rank = threadIdx.x % kWarpThreads;
    share.size = kWarpThreads;
    share.row = row - static_cast<int>(share.team);
    share.chunk_index = 0;
    share.begin = 0;
    share.count = 0;
    if (share.row >= 0 && rows.block_in(share.row) == 0) {
      share.count = static_cast<std::uint32_t>(rows.numel(share.row));
    } else {
      share.row = -1;
    }
    return share;
  }
  share.team = 0;
  share.rank = threadIdx.x;
  share.size = kThreads;
  share.row = row;
  share.chunk_index = from_the_end ? rows.blocks_behind(row) : rows.block_in(row);
  share.begin = static_cast<std::int64_t>(share.chunk_index) * rows.chunk;
  const std::int64_t rest = rows.numel(row) - share.begin;
  share.count = rest < rows.chunk ? static_cast<std::uint32_t>(rest) : rows.chunk;
  return share;
}

}  // namespace torchfuse::kernels::cuda
