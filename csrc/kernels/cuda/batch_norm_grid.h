// SPDX-License-Identifier: BSD-3-Clause
// Distributes batch normalization's passes over a grid.
//
// Note [Windows]
// A thread reads one 16-byte window at a time. Channels first, windows are 16-byte aligned in one
// tensor. A plane's first and last windows may extend beyond the plane and are then accessed
// element by element. Other tensors are accessed as widely as their addresses allow. Channels last,
// a window holds adjacent channels of a row. If planes (channels last: rows) consist of whole
// windows and all tensors are aligned, the host chooses an instance with 16-byte accesses only.
//
// A block has `columns` * `lanes` * `rows` threads. Lanes share a plane. Each column handles a
// different plane (channels last: a different window of a row). Each row handles a different unit:
// `lanes` windows in a plane. Columns are adjacent in memory, so a warp reads contiguous bytes even
// if planes are small. A block's columns form a tile of channels. A tile's units are divided into
// slices, one block each. The slice count fills one to three waves of resident blocks as completely
// as possible. So the shape, strides and multiprocessor count determine the partition and every
// sum's bits.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <initializer_list>

#include "kernels/batch_norm.h"
#include "kernels/cuda/alignment.h"

namespace torchfuse::kernels::cuda {

constexpr std::uint32_t kGridThreads = 256;
/// Adjacent windows in a row that a sum block reads: 64 bytes. With wider tiles, each tile's last
/// block would add more partials.
constexpr std::int64_t kSumColumns = 4;
constexpr std::int64_t kWarpLanes = 32;
constexpr std::uint32_t kGridWarps = kGridThreads / kWarpLanes;
/// Minimum units per thread that make another slice worthwhile.
constexpr std::int64_t kMinUnits = 4;

struct BatchNormGrid {
  std::int64_t channels;
  std::int64_t inner;
  std::int64_t units;        ///< units per channel
  std::int64_t slice_units;  ///< units per slice; the last slice may have fewer
  std::int64_t tiles;
  std::int64_t slices;
  std::uint32_t lanes;  ///< lanes, columns and rows are powers of two
  std::uint32_t columns;
  std::uint32_t rows;
  std::uint32_t segments;  ///< units per plane
  std::uint32_t row_step;  ///< `rows` units as complete planes; the rest is segment_step
  std::uint32_t segment_step;
  std::uint32_t phase;       ///< elements from a boundary to the followed tensor's start
  std::uint32_t outer_step;  ///< the followed tensor's strides
  std::uint32_t channel_step;

  std::int64_t blocks() const { return tiles * slices; }
};

constexpr std::int64_t kMostWaves = 3;

/// Returns the number of slices per tile, at most `useful`, that best fills waves of `resident`
/// blocks.
inline std::int64_t slices_of_full_waves(std::int64_t tiles, std::int64_t resident,
                                         std::int64_t useful) {
  std::int64_t best = 1;
  std::int64_t best_filled = 0;
  std::int64_t best_waves = 1;
  for (std::int64_t waves = 1; waves <= kMostWaves; ++waves) {
    const std::int64_t slices = std::min(waves * resident / tiles, useful);
    // Use more waves only if they are filled more completely.
    if (slices * tiles * best_waves <= best_filled * waves) continue;
    best = slices;
    best_filled = slices * tiles;
    best_waves = waves;
  }
  return best;
}

/// Windows follow strides, and in kElements also the address, on which sums must not depend.
enum class BatchNormPass { kSums, kElements };

/// Windows follow the tensor `operand`. The device runs `blocks` blocks at once.
inline BatchNormGrid batch_norm_grid(const BatchNormShape& shape, const BatchNormInput& operand,
                                     BatchNormPass pass, std::int64_t blocks) {
  const auto divide_up = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
  const auto power_of_two = [](std::int64_t n) {
    return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(n)));
  };
  const auto size = static_cast<std::int64_t>(size_of(shape.dtype));
  const std::int64_t vec = kVectorBytes / size;
  const std::int64_t some_channels = std::max<std::int64_t>(shape.channels, 1);
  BatchNormGrid grid{};
  grid.channels = shape.channels;
  grid.inner = shape.inner;
  std::int64_t lanes = 1;
  std::int64_t columns;
  std::int64_t segments = 1;
  if (shape.channels_last) {
    columns = std::min(pass == BatchNormPass::kSums ? kSumColumns : kWarpLanes,
                       power_of_two(divide_up(some_channels, vec)));
    grid.tiles = divide_up(some_channels, columns * vec);
  } else {
    const auto address = reinterpret_cast<std::uintptr_t>(operand.data);
    grid.phase =
        pass == BatchNormPass::kElements
            ? static_cast<std::uint32_t>(address % kVectorBytes) / static_cast<std::uint32_t>(size)
            : 0;
    grid.outer_step = static_cast<std::uint32_t>(operand.outer_stride);
    grid.channel_step = static_cast<std::uint32_t>(operand.channel_stride);
    const std::uint32_t steps = grid.phase | grid.outer_step | grid.channel_step;
    const std::int64_t most_past = steps % static_cast<std::uint32_t>(vec) == 0 ? 0 : vec - 1;
    const std::int64_t windows = divide_up(std::max<std::int64_t>(shape.inner, 1) + most_past, vec);
    lanes = std::min(kWarpLanes, power_of_two(windows));
    columns = std::min(kWarpLanes / lanes, power_of_two(some_channels));
    segments = divide_up(windows, lanes);
    grid.tiles = divide_up(some_channels, columns);
  }
  grid.lanes = static_cast<std::uint32_t>(lanes);
  grid.columns = static_cast<std::uint32_t>(columns);
  grid.rows = kGridThreads / (grid.lanes * grid.columns);
  grid.segments = static_cast<std::uint32_t>(segments);
  grid.row_step = grid.rows / grid.segments;
  grid.segment_step = grid.rows % grid.segments;
  grid.units = shape.numel() == 0 ? 0 : shape.outer * segments;
  const std::int64_t useful = divide_up(grid.units, grid.rows * kMinUnits);
  const std::int64_t slices = slices_of_full_waves(grid.tiles, blocks, useful);
  grid.slice_units = std::max<std::int64_t>(divide_up(grid.units, slices), 1);
  grid.slices = std::max<std::int64_t>(divide_up(grid.units, grid.slice_units), 1);
  return grid;
}

/// Returns whether every window of every tensor is whole and aligned. Absent tensors are.
inline bool windows_are_whole(const BatchNormShape& shape,
                              std::initializer_list<BatchNormInput> tensors) {
  const auto size = static_cast<std::int64_t>(size_of(shape.dtype));
  std::int64_t elements = shape.channels_last ? shape.channels : shape.inner;
  std::uintptr_t addresses = 0;
  for (const BatchNormInput& tensor : tensors) {
    if (tensor.data == nullptr) continue;
    addresses |= reinterpret_cast<std::uintptr_t>(tensor.data);
    elements |= tensor.outer_stride | (shape.channels_last ? 0 : tensor.channel_stride);
  }
  return elements * size % kVectorBytes == 0 && legal_width(addresses) == kVectorBytes;
}

/// Describes a written tensor, whose strides are dense.
inline BatchNormInput dense(const BatchNormShape& shape, const void* data) {
  return BatchNormInput{data, shape.channels * shape.inner, shape.inner};
}

}  // namespace torchfuse::kernels::cuda
