// SPDX-License-Identifier: BSD-3-Clause
// Arguments of a launch whose rows are on the device. See Note [Device tables].
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/common/device_table.h"
#include "kernels/cuda/alignment.h"
#include "kernels/cuda/launch_table.cuh"

namespace torchfuse::kernels::cuda {

/// Rows [first, first + count) of a table. The struct, including gradient addresses, has at most
/// `kBytes` bytes.
template <std::size_t kBytes>
struct DeviceSpan {
  static constexpr std::size_t kFixedBytes = 2 * sizeof(void*) + 6 * sizeof(std::int32_t);
  static constexpr std::int32_t kRows =
      static_cast<std::int32_t>((kBytes - kFixedBytes) / sizeof(void*) / kWarps * kWarps);

  const DeviceRow* rows;             ///< the table's rows
  const std::int32_t* row_of_block;  ///< the table's last row per block
  std::int32_t first;
  std::int32_t count;
  std::uint32_t first_block;  ///< index of the grid's block 0 in the table
  std::uint32_t block_step;   ///< index step per block: 1, or -1 in a span from the end
  std::uint32_t blocks;       ///< grid size
  std::uint32_t chunk;        ///< elements per chunk
  void* grads[kRows];         ///< null if the row is not in this launch

  /// Fills the span with as many rows from `begin` on as fit. Returns how many rows take part:
  /// those with a non-null grad_of(position in the list).
  template <class GradOf>
  std::int32_t fill(const DeviceTable& table, std::int32_t begin, bool from_the_end,
                    GradOf grad_of) {
    const DeviceRow* const host = table.host_rows;
    const std::int32_t end = begin + std::min(kRows, table.count - begin);
    rows = table.rows;
    row_of_block = table.row_of_block;
    first = begin;
    count = end - begin;
    first_block = host[begin].first_block;
    blocks = (end == table.count ? table.blocks : host[end].first_block) - first_block;
    block_step = from_the_end ? ~0u : 1;
    if (from_the_end) first_block += blocks - 1;
    chunk = table.chunk;
    std::int32_t taken = 0;
    for (std::int32_t i = 0; i < count; ++i) {
      grads[i] = grad_of(host[begin + i].position);
      if (grads[i] != nullptr) ++taken;
    }
    return taken;
  }

  /// Returns the calling block's index in the table.
  __device__ __forceinline__ std::uint32_t block() const {
    return first_block + blockIdx.x * block_step;
  }
  /// Like LaunchTable's functions. Rows are numbered from the span's first row.
  __device__ __forceinline__ int last_row_here() const { return row_of_block[block()] - first; }
  __device__ __forceinline__ const DeviceRow& row(int place) const { return rows[first + place]; }
  __device__ __forceinline__ std::int64_t numel(int place) const { return row(place).tensor.numel; }
  __device__ __forceinline__ std::uint32_t block_in(int place) const {
    return block() - row(place).first_block;
  }
};

/// Returns whether an update's span may contain the row. Unused operands count, too.
inline bool all_aligned(const TensorRow& tensor) {
  std::uintptr_t low_bits = 0;
  for (const void* address : {tensor.param, tensor.grad, tensor.master, tensor.ema}) {
    low_bits |= reinterpret_cast<std::uintptr_t>(address);
  }
  for (const void* state : tensor.state) low_bits |= reinterpret_cast<std::uintptr_t>(state);
  return legal_width(low_bits) == kVectorBytes;
}

/// A launch's rows, stored either by value in `table` or on the device in `span`.
template <class Launch>
struct EitherRows {
  const Launch& launch;
  std::uint32_t chunk;

  __device__ __forceinline__ explicit EitherRows(const Launch& of)
      : launch(of), chunk(of.is_span ? of.span.chunk : of.table.chunk) {}
  __device__ __forceinline__ int last_row_here() const {
    return launch.is_span ? launch.span.last_row_here() : launch.table.last_row_here();
  }
  __device__ __forceinline__ std::int64_t numel(int row) const {
    return launch.is_span ? launch.span.numel(row) : launch.table.numel(row);
  }
  __device__ __forceinline__ std::uint32_t block_in(int row) const {
    return launch.is_span ? launch.span.block_in(row) : launch.table.block_in(row);
  }
  /// Only for rows by value. In a span from the end, the blocks' order already gives the direction.
  __device__ __forceinline__ std::uint32_t blocks_behind(int row) const {
    return launch.table.blocks_behind(row);
  }
};

}  // namespace torchfuse::kernels::cuda
