// SPDX-License-Identifier: BSD-3-Clause
// Shared by the batch normalization passes: row blocks, prefetching, terms by channel, plane runs.
#pragma once

#include <cstdint>

#include "kernels/batch_norm.h"
#include "kernels/cpu/batch_norm_split.h"
#include "kernels/cpu/elements.h"
#include "kernels/cpu/streaming.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

/// Rows per block. A block loads a channel's data once for all rows. Sums use kRowBlock rows.
/// Results use kWriteBlock rows, because stores need a share of the cache.
constexpr std::int64_t kRowBlock = 4;
constexpr std::int64_t kWriteBlock = 2;
/// Vectors per row of a write block, so that 16-bit rows are written a line at a time.
constexpr std::int64_t kWriteVectors = 2;

// Note [Prefetching in order]
// A hardware prefetcher follows a sequential stream. It follows neither block rows that are read
// alternately within a page nor a sequence of many short planes. Therefore each line is prefetched
// explicitly, in memory order. With uncached data on an AMD EPYC, reading rows of 512 to 1,024
// bytes then takes half to two thirds of the time.
/// Prefetch distances in bytes: kRowsAheadBytes for row sums, kPlanesAheadBytes for plane sums,
/// kAheadBytes for results.
constexpr std::int64_t kRowsAheadBytes = 8192;
constexpr std::int64_t kPlanesAheadBytes = 1024;
/// Prefetch distance for rows that are not adjacent, or whose channels are processed in parts.
constexpr std::int64_t kRowsAhead = 4;

template <std::int64_t kVectors>
struct Vectors {
  static constexpr std::int64_t value = kVectors;
};

/// Returns the size of `elements` elements.
template <DType kDType>
constexpr std::int64_t bytes_of(std::int64_t elements) {
  return elements * static_cast<std::int64_t>(sizeof(ElementOf<kDType>));
}

/// Returns whether a tensor's rows are adjacent.
TORCHFUSE_INLINE bool is_one_run(const BatchNormInput& input, std::int64_t channels) {
  return input.outer_stride == channels;
}

/// Prefetches later rows of `input` for a block's row `r` from channel `c` on. An item has
/// `channels` channels per row.
template <std::int64_t kRows, std::int64_t kWidth, class E>
TORCHFUSE_INLINE void prefetch_rows(const E* block, const BatchNormInput& input,
                                    std::int64_t channels, std::int64_t r, std::int64_t c) {
  if (is_one_run(input, channels)) {
    prefetch(block + c * kRows + r * kWidth, kRowsAheadBytes);
  } else {
    prefetch(block + (r + kRowsAhead) * input.outer_stride + c, 0);
  }
}

/// Calls block(Vectors<n>(), c) for n vectors of channels from `c` on, and single(c) for channels
/// in rows shorter than a vector. Results and inputs are separate memory, so the last vector may
/// overlap the previous one.
template <std::int64_t kWidth, class Block, class Single>
TORCHFUSE_INLINE void for_each_block_of_row(std::int64_t channels, const Block& block,
                                            const Single& single) {
  std::int64_t c = 0;
  for (; c + kWriteVectors * kWidth <= channels; c += kWriteVectors * kWidth) {
    block(Vectors<kWriteVectors>(), c);
  }
  for (; c + kWidth <= channels; c += kWidth) block(Vectors<1>(), c);
  if (c == channels) return;
  if (channels >= kWidth) return block(Vectors<1>(), channels - kWidth);
  for (; c < channels; ++c) single(c);
}

/// Prefetches every line of the `bytes` bytes that begin `ahead` bytes after `p`.
TORCHFUSE_INLINE void prefetch_lines(const void* p, std::int64_t bytes, std::int64_t ahead) {
  for (std::int64_t i = 0; i < bytes; i += kLineBytes) prefetch(p, ahead + i);
}

/// Returns row `row` of the terms, from channel `c` on.
template <class T>
TORCHFUSE_INLINE const T* terms_row(const void* terms, std::int64_t row, std::int64_t channels,
                                    std::int64_t c) {
  return static_cast<const T*>(terms) + row * channels + c;
}

template <DType kDType>
TORCHFUSE_INLINE const ElementOf<kDType>* run_of(const BatchNormInput& input, std::int64_t outer,
                                                 std::int64_t c, std::int64_t i) {
  return static_cast<const ElementOf<kDType>*>(input.data) + outer * input.outer_stride +
         c * input.channel_stride + i;
}

/// Calls body(outer, channel, first, count, offset) for each plane run in a dense tensor's elements
/// [begin, end). `offset` is the index of the run's first element.
template <class Body>
TORCHFUSE_INLINE void for_each_run(const BatchNormShape& shape, std::int64_t begin,
                                   std::int64_t end, const Body& body) {
  while (begin < end) {
    const std::int64_t plane = begin / shape.inner;
    const std::int64_t first = begin - plane * shape.inner;
    const std::int64_t count = smaller(shape.inner - first, end - begin);
    body(plane / shape.channels, plane % shape.channels, first, count, begin);
    begin += count;
  }
}

/// The rows that begin in a dense tensor's elements [begin, end).
struct RowRange {
  std::int64_t begin, end;
};
TORCHFUSE_INLINE RowRange rows_within(const BatchNormShape& shape, std::int64_t begin,
                                      std::int64_t end) {
  return RowRange{divide_up(begin, shape.channels), divide_up(end, shape.channels)};
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
