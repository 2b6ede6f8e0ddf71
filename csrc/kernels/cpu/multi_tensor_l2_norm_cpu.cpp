// SPDX-License-Identifier: BSD-3-Clause
// Computes sum of squares and non-finite flag in a single read. Every kNormChunk-element chunk is
// summed in the lanes of cpu/lane_sums.h.
#include "kernels/multi_tensor_l2_norm.h"

#include "kernels/cpu/elements.h"
#include "kernels/cpu/lane_sums.h"
#include "kernels/cpu/prefetch.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

namespace {

// Note [Chunks in parts]
// A pass over one operand reads more slowly than a pass over several. While a chunk is summed, the
// next chunk is therefore prefetched to the second-level cache in as many parts as an element has
// bytes, one line of each part per 64 elements. On a Sapphire Rapids, the norm of a large tensor
// takes 10 % less time. A chunk whose predecessor did not do so is prefetched as in Note [Two
// prefetch distances].

/// Sums one chunk, a tensor's elements [begin, end). `fetched`: the previous chunk was summed by
/// the same thread just before.
template <DType kDType>
TORCHFUSE_INLINE NormPartial sum_chunk(const ElementOf<kDType>* grad, std::int64_t begin,
                                       std::int64_t end, Ahead ahead, bool fetched) {
  using T = ComputeOf<kDType>;
  using V = VectorOf<kDType>;
  constexpr auto kSize = static_cast<std::int64_t>(sizeof *grad);
  Sums<T> sums;
  V small[kLaneVectors<T>];
  for (V& vector : small) vector = V(T(0));
  const auto add = [&](const ElementOf<kDType>* lanes) __attribute__((always_inline)) {
    V x[kLaneVectors<T>];
    V largest(T(0));
#pragma GCC unroll 16
    for (std::int64_t v = 0; v < kLaneVectors<T>; ++v) {
      x[v] = load_vector<kDType>(lanes + v * kWidthOf<kDType>);
      largest = larger_magnitude(largest, x[v]);
    }
    add_lanes<T>(sums, small, x, largest);
  };
  const bool fetches = ahead.far_end >= begin + 2 * kNormChunk;
  const std::int64_t far_end = fetches && fetched ? 0 : ahead.far_end;
  std::int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    if (i < ahead.near_end) prefetch_ahead<1>(grad, i * kSize, kLanes * kSize);
    if (i < far_end) prefetch_ahead<2>(grad, i * kSize, kLanes * kSize);
    for (std::int64_t part = 0; fetches && part < kSize; ++part) {
      prefetch<2>(grad + begin + kNormChunk, part * kNormChunk + (i - begin));
    }
    add(grad + i);
  }
  if (i < end) {
    // Zeros past the end add nothing.
    ElementOf<kDType> buffer[kLanes] = {};
    memcpy(buffer, grad + i, static_cast<std::size_t>((end - i) * kSize));
    add(buffer);
  }
  memcpy(sums.small, small, sizeof sums.small);
  return finish(sums);
}

template <DType kDType>
void sum_elements(const L2NormArgs& args, std::int64_t begin, std::int64_t end) {
  const TensorTable& table = args.tensors;
  constexpr auto kSize = static_cast<std::int64_t>(sizeof(ElementOf<kDType>));
  for (std::int64_t t = find_row(table.offsets, table.count, begin);
       t < table.count && table.offsets[t] < end; ++t) {
    const TensorRow& row = table.rows[t];
    const auto* grad = static_cast<const ElementOf<kDType>*>(row.grad);
    const std::int64_t skipped = begin - table.offsets[t];
    const std::int64_t rest = end - table.offsets[t];
    Ahead ahead = ahead_of(table, row, kSize, kSize);
    if (rest < ahead.far_end) ahead.far_end = rest;
    prefetch_later_grad(table, t);
    for_each_norm_chunk(table, t, begin, end,
                        [&](std::int64_t chunk, std::int64_t first, std::int64_t stop)
                            __attribute__((always_inline)) {
                              const bool fetched = first > 0 && first >= skipped + kNormChunk;
                              args.partials[args.chunk_offsets[t] + chunk] =
                                  sum_chunk<kDType>(grad, first, stop, ahead, fetched);
                            });
  }
}

}  // namespace

void multi_tensor_l2_norm(const L2NormArgs& args, std::int64_t begin, std::int64_t end) {
  if (begin >= end) return;
  with_dtype(args.tensors.grad, [&]<DType kDType>() { sum_elements<kDType>(args, begin, end); });
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
