// SPDX-License-Identifier: BSD-3-Clause
// What the batch normalization passes share: gates, terms by channel, runs of planes.
#pragma once

#include <cstdint>

#include "kernels/batch_norm.h"
#include "kernels/cpu/batch_norm_split.h"
#include "kernels/cpu/elements.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

/// Rows that are worked on together, so that what belongs to a channel is loaded once for all of
/// them: of sums, and of results, whose stores take their share of the cache.
constexpr std::int64_t kRowBlock = 4;
constexpr std::int64_t kWriteBlock = 2;
/// How far ahead sums of rows are prefetched: a tile's part of the next row may lie in another
/// page, which the processor does not foresee.
constexpr std::int64_t kRowsAhead = 4;

/// Row `row` of the terms, from channel `c` on.
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

/// Calls body(outer, channel, first, count, offset) for the runs of planes that elements
/// [begin, end) of a dense tensor consist of; `offset` is the first element's own.
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

/// The rows that begin within elements [begin, end) of a dense tensor.
struct RowRange {
  std::int64_t begin, end;
};
TORCHFUSE_INLINE RowRange rows_within(const BatchNormShape& shape, std::int64_t begin,
                                      std::int64_t end) {
  return RowRange{divide_up(begin, shape.channels), divide_up(end, shape.channels)};
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
