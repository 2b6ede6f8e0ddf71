// SPDX-License-Identifier: BSD-3-Clause
// Splits a batch normalization's sums into items. The split depends only on the shape.
#pragma once

#include <cstdint>

#include "kernels/batch_norm.h"
#include "kernels/common/macros.h"

namespace torchfuse::kernels::cpu {

/// Elements of a channel per partial sum: enough that partials cost little traffic, and few enough
/// that fp32 lanes stay accurate and threads can share the work.
constexpr std::int64_t kPlaneElements = 8192;
constexpr std::int64_t kRowsPerItem = 512;
/// If rows need several items, the item count is a multiple of kRowItemsMultiple. Threads then get
/// equally many items, and the items have similar sizes.
constexpr std::int64_t kRowItemsMultiple = 4;
/// Channels per row item, so that the accumulators stay in the first-level cache.
constexpr std::int64_t kTileChannels = 256;

/// An item covers outer_step samples, inner_step elements in a plane and channel_step channels.
struct BatchNormSplit {
  std::int64_t outer_step, inner_step, channel_step;
  std::int64_t outer_items, inner_items, channel_items;
};

/// The part of a tensor that an item covers.
struct BatchNormItem {
  std::int64_t partial_row;
  std::int64_t outer_begin, outer_end;
  std::int64_t inner_begin, inner_end;
  std::int64_t channel_begin, channel_end;

  TORCHFUSE_HOST_DEVICE double count() const {
    return static_cast<double>((outer_end - outer_begin) * (inner_end - inner_begin));
  }
};

TORCHFUSE_HOST_DEVICE std::int64_t divide_up(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}
TORCHFUSE_HOST_DEVICE std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

TORCHFUSE_HOST_DEVICE BatchNormSplit split_of(const BatchNormShape& shape) {
  BatchNormSplit split{};
  if (shape.channels_last) {
    const std::int64_t fours = divide_up(shape.outer, kRowsPerItem * kRowItemsMultiple);
    split.outer_step = shape.outer <= kRowsPerItem
                           ? kRowsPerItem
                           : divide_up(shape.outer, fours * kRowItemsMultiple);
    split.inner_step = 1;
    split.channel_step = kTileChannels;
  } else if (shape.inner >= kPlaneElements) {
    split.outer_step = 1;
    split.inner_step = kPlaneElements;
    split.channel_step = 1;
  } else {
    split.outer_step = shape.inner == 0 ? 1 : kPlaneElements / shape.inner;
    split.inner_step = shape.inner;
    split.channel_step = 1;
  }
  const bool empty = shape.numel() == 0;
  split.outer_items = empty ? 0 : divide_up(shape.outer, split.outer_step);
  split.inner_items = empty ? 0 : divide_up(shape.inner, split.inner_step);
  split.channel_items = empty ? 0 : divide_up(shape.channels, split.channel_step);
  return split;
}

TORCHFUSE_HOST_DEVICE BatchNormItem item_of(const BatchNormShape& shape,
                                            const BatchNormSplit& split, std::int64_t partial_row,
                                            std::int64_t channel_item) {
  BatchNormItem item{};
  item.channel_begin = channel_item * split.channel_step;
  item.channel_end = smaller(item.channel_begin + split.channel_step, shape.channels);
  item.partial_row = partial_row;
  item.inner_begin = partial_row % split.inner_items * split.inner_step;
  item.inner_end = smaller(item.inner_begin + split.inner_step, shape.inner);
  item.outer_begin = partial_row / split.inner_items * split.outer_step;
  item.outer_end = smaller(item.outer_begin + split.outer_step, shape.outer);
  return item;
}

/// Neighboring items are adjacent in memory: first the parts of a plane, then the channels.
TORCHFUSE_HOST_DEVICE BatchNormItem item_of(const BatchNormShape& shape,
                                            const BatchNormSplit& split, std::int64_t index) {
  const std::int64_t channel = index / split.inner_items;
  const std::int64_t samples = channel / split.channel_items;
  return item_of(shape, split, samples * split.inner_items + index % split.inner_items,
                 channel % split.channel_items);
}

}  // namespace torchfuse::kernels::cpu
