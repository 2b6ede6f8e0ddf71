// SPDX-License-Identifier: BSD-3-Clause
// Shared by the batch normalization passes: row blocks, prefetching, terms by channel, plane runs.
#pragma once

#include <cstdint>

#include "kernels/batch_norm.h"
#include "kernels/cpu/batch_norm_split.h"
#include "kernels/cpu/elements.h"
#include "kernels/cpu/prefetch.h"
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
// Uncached rows, and planes of more than kFarBytes, are prefetched twice: see Note [Two prefetch
// distances].
/// Prefetch distances of rows in bytes: kAheadBytes for results and for rows that are prefetched
/// twice, kRowsAheadBytes for other sums and for the second-level cache.
constexpr std::int64_t kAheadBytes = 2048;
constexpr std::int64_t kRowsAheadBytes = 8192;
/// Prefetch distance for rows that are not adjacent, or whose channels are processed in parts.
constexpr std::int64_t kRowsAhead = 4;

template <std::int64_t kVectors>
struct Vectors {
  static constexpr std::int64_t value = kVectors;
};

/// Returns whether a pass prefetches twice. With 16-bit elements, it computes for longer than it
/// waits for memory.
template <DType kDType>
TORCHFUSE_INLINE bool fetches_far(const BatchNormShape& shape) {
  constexpr auto kSize = static_cast<std::int64_t>(sizeof(ElementOf<kDType>));
  return kSize > 2 && shape.numel() * kSize >= kUncachedBytes;
}

/// Returns a plane's number of elements from `begin` on if the pass prefetches twice, otherwise 0.
template <DType kDType>
TORCHFUSE_INLINE std::int64_t left_in_plane(const BatchNormShape& shape, std::int64_t begin) {
  return fetches_far<kDType>(shape) ? shape.inner - begin : 0;
}

/// Prefetches ahead of `count` elements of a plane. `left` is the result of left_in_plane() for
/// `p`.
template <class E>
TORCHFUSE_INLINE void prefetch_plane(const E* p, std::int64_t count, std::int64_t left) {
  constexpr auto kSize = static_cast<std::int64_t>(sizeof(E));
  prefetch_ahead<1>(p, 0, count * kSize);
  if (left * kSize > kFarBytes) prefetch_ahead<2>(p, 0, count * kSize);
}

/// Returns whether a tensor's rows are adjacent.
TORCHFUSE_INLINE bool is_one_run(const BatchNormInput& input, std::int64_t channels) {
  return input.outer_stride == channels;
}

/// Prefetches ahead of `p` in adjacent rows.
TORCHFUSE_INLINE void prefetch_run(const void* p, bool far) {
  prefetch(p, kAheadBytes);
  if (far) prefetch<2>(p, kRowsAheadBytes);
}

/// Prefetches later rows of `input` for a block's row `r` from channel `c` on. An item has
/// `channels` channels per row.
template <std::int64_t kRows, std::int64_t kWidth, class E>
TORCHFUSE_INLINE void prefetch_rows(const E* block, const BatchNormInput& input,
                                    std::int64_t channels, std::int64_t r, std::int64_t c,
                                    bool far) {
  if (is_one_run(input, channels)) {
    const E* const p = block + c * kRows + r * kWidth;
    prefetch(p, far ? kAheadBytes : kRowsAheadBytes);
    if (far) prefetch<2>(p, kRowsAheadBytes);
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

/// A pass over all elements: result = compute(first, second, the channel's terms).
struct ElementPass {
  BatchNormShape shape;
  BatchNormInput first;
  BatchNormInput second;  ///< not read by passes over one tensor
  const void* terms;
  void* result;  ///< dense
};

/// Computes the planes' elements [begin, end). `kHasSecond`: the pass reads `second`.
template <DType kDType, bool kHasSecond, std::int64_t kTerms, class Compute>
__attribute__((noinline)) void write_planes(const ElementPass& pass, std::int64_t begin,
                                            std::int64_t end, const Compute& compute) {
  using E = ElementOf<kDType>;
  using T = ComputeOf<kDType>;
  using V = VectorOf<kDType>;
  constexpr std::int64_t kLine = kLineBytes / static_cast<std::int64_t>(sizeof(E));
  const BatchNormShape& shape = pass.shape;
  const bool worth_streaming =
      is_worth_streaming<kDType>(pass.result, shape.outer * shape.channels, shape.inner);
  for_each_run(shape, begin, end,
               [&](std::int64_t o, std::int64_t c, std::int64_t first, std::int64_t count,
                   std::int64_t offset) __attribute__((always_inline)) {
                 const E* a = run_of<kDType>(pass.first, o, c, first);
                 const E* b = kHasSecond ? run_of<kDType>(pass.second, o, c, first) : a;
                 E* result = static_cast<E*>(pass.result) + offset;
                 T terms[kTerms];
                 V vectors[kTerms];
#pragma GCC unroll 6
                 for (std::int64_t k = 0; k < kTerms; ++k) {
                   terms[k] = *terms_row<T>(pass.terms, k, shape.channels, c);
                   vectors[k] = V(terms[k]);
                 }
                 const bool streamed = worth_streaming && are_lines<kDType>(result, count);
                 const std::int64_t left = left_in_plane<kDType>(shape, first);
                 for_each_element<kWidthOf<kDType>>(
                     count,
                     [&](std::int64_t i) __attribute__((always_inline)) {
                       if (left > 0 && i % kLine == 0) {
                         prefetch_plane(a + i, kLine, left - i);
                         if (kHasSecond) prefetch_plane(b + i, kLine, left - i);
                       }
                       store_in_row<kDType>(
                           result + i,
                           compute(load_vector<kDType>(a + i), load_vector<kDType>(b + i), vectors),
                           streamed);
                     },
                     [&](std::int64_t i) __attribute__((always_inline)) {
                       store_one(result + i, compute(load_one(a + i), load_one(b + i), terms));
                     });
               });
  if (worth_streaming) finish_streaming();
}

/// Like write_planes(), for the rows that begin in this range. Loads kWriteBlock rows of a channel
/// before the first store. If rows are a multiple of 4 KB apart, a load would otherwise wait for a
/// store to the same offset in another page.
template <DType kDType, bool kHasSecond, std::int64_t kTerms, class Compute>
__attribute__((noinline)) void write_rows(const ElementPass& pass, std::int64_t begin,
                                          std::int64_t end, const Compute& compute) {
  using E = ElementOf<kDType>;
  using T = ComputeOf<kDType>;
  using V = VectorOf<kDType>;
  constexpr std::int64_t kWidth = kWidthOf<kDType>;
  const std::int64_t channels = pass.shape.channels;
  const T* term_rows[kTerms];
#pragma GCC unroll 6
  for (std::int64_t k = 0; k < kTerms; ++k) term_rows[k] = terms_row<T>(pass.terms, k, channels, 0);
  const std::int64_t a_stride = pass.first.outer_stride;
  const std::int64_t b_stride = kHasSecond ? pass.second.outer_stride : a_stride;
  const bool a_is_run = is_one_run(pass.first, channels);
  const bool b_is_run = kHasSecond && is_one_run(pass.second, channels);
  const bool far = fetches_far<kDType>(pass.shape);
  const bool streamed = is_worth_streaming<kDType>(pass.result, pass.shape.outer, channels);
  const auto write = [&](auto row_count, std::int64_t row) __attribute__((always_inline)) {
    constexpr std::int64_t kRows = decltype(row_count)::value;
    const E* a = run_of<kDType>(pass.first, row, 0, 0);
    const E* b = kHasSecond ? run_of<kDType>(pass.second, row, 0, 0) : a;
    E* result = static_cast<E*>(pass.result) + row * channels;
    const auto write_vectors = [&](auto vector_count,
                                   std::int64_t c) __attribute__((always_inline)) {
      constexpr std::int64_t kVectors = decltype(vector_count)::value;
      V out[kRows][kVectors];
#pragma GCC unroll 4
      for (std::int64_t v = 0; v < kVectors; ++v) {
        const std::int64_t at = c + v * kWidth;
        V terms[kTerms];
#pragma GCC unroll 6
        for (std::int64_t k = 0; k < kTerms; ++k) terms[k] = load_terms(term_rows[k] + at);
#pragma GCC unroll 4
        for (std::int64_t r = 0; r < kRows; ++r) {
          if (a_is_run) prefetch_run(a + at * kRows + r * kWidth, far);
          if (b_is_run) prefetch_run(b + at * kRows + r * kWidth, far);
          out[r][v] = compute(load_vector<kDType>(a + r * a_stride + at),
                              load_vector<kDType>(b + r * b_stride + at), terms);
        }
      }
#pragma GCC unroll 4
      for (std::int64_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (std::int64_t v = 0; v < kVectors; ++v) {
          store_in_row<kDType>(result + r * channels + c + v * kWidth, out[r][v], streamed);
        }
      }
    };
    const auto write_elements = [&](std::int64_t c) __attribute__((always_inline)) {
      T terms[kTerms];
      for (std::int64_t k = 0; k < kTerms; ++k) terms[k] = term_rows[k][c];
      for (std::int64_t r = 0; r < kRows; ++r) {
        store_one(result + r * channels + c,
                  compute(load_one(a + r * a_stride + c), load_one(b + r * b_stride + c), terms));
      }
    };
    for_each_block_of_row<kWidth>(channels, write_vectors, write_elements);
  };
  // The rows that begin in the range.
  for_each_row_block<kWriteBlock>(divide_up(begin, channels), divide_up(end, channels), write);
  if (streamed) finish_streaming();
}

template <DType kDType, bool kHasSecond, std::int64_t kTerms, class Compute>
TORCHFUSE_INLINE void write_elements(const ElementPass& pass, std::int64_t begin, std::int64_t end,
                                     const Compute& compute) {
  if (pass.shape.channels_last) {
    return write_rows<kDType, kHasSecond, kTerms>(pass, begin, end, compute);
  }
  write_planes<kDType, kHasSecond, kTerms>(pass, begin, end, compute);
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
