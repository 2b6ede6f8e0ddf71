// SPDX-License-Identifier: BSD-3-Clause
// How one launch covers many tensors of any size.
//
// Note [Launch tables]
// All that a launch needs to know about its tensors is passed by value in the kernel's arguments:
// no device memory, no copy, nothing that a captured graph could find changed. Lists longer than
// the argument limit take several launches, unless they are kept on the device: see Note [Device
// tables]. Block b finds its tensor by binary search over `first_block`, which holds the first
// block of each row.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "kernels/common/blocks.h"
#include "kernels/cuda/launch.cuh"

namespace torchfuse::kernels::cuda {

/// Rows that fit beside `fixed_bytes` of other arguments; 32 bytes are kept for counts and padding.
constexpr int table_capacity(std::size_t bytes_per_row, std::size_t fixed_bytes) {
  return static_cast<int>((kMaxArgumentBytes - fixed_bytes - 32) /
                          (bytes_per_row + sizeof(std::uint32_t)));
}

/// `Row` is any plain struct with a member `numel`.
template <class Row, int kCapacity>
struct LaunchTable {
  Row rows[kCapacity];
  std::uint32_t first_block[kCapacity];
  std::int32_t count;
  std::uint32_t chunk;  ///< elements
  BlockCounter counter;

  void reset(std::uint32_t chunk_elements) {
    count = 0;
    chunk = chunk_elements;
    counter.reset();
  }

  bool full() const { return count == kCapacity; }
  std::uint32_t blocks() const { return counter.blocks; }

  /// Appends a row that is not empty and returns its index.
  int append(const Row& row) {
    first_block[count] = counter.take(row.numel, chunk);
    rows[count] = row;
    return count++;
  }

  /// The last row of which the calling block handles something.
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
  /// Which of a row's blocks the calling one is.
  __device__ __forceinline__ std::uint32_t block_in(int row) const {
    return blockIdx.x - first_block[row];
  }
  /// How many of a row's blocks come behind the calling one.
  __device__ __forceinline__ std::uint32_t blocks_behind(int row) const {
    const std::uint32_t end = row + 1 < count ? first_block[row + 1] : counter.blocks;
    return end - 1 - blockIdx.x;
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

/// `Rows` is a launch table, or what else says the same of the rows of a launch. `from_the_end`:
/// the blocks of a row take its chunks from the last to the first.
template <class Rows>
__device__ __forceinline__ RowShare row_share(const Rows& rows, bool from_the_end = false) {
  const int row = rows.last_row_here();
  RowShare share;
  if (fits_warp(rows.numel(row))) {
    // Warp w takes the w-th row before the last one of the block.
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
