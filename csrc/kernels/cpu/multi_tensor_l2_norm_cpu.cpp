// SPDX-License-Identifier: BSD-3-Clause
// Computes sum of squares and non-finite flag in a single read. Every kNormChunk-element chunk is
// summed in the lanes of cpu/lane_sums.h.
#include "kernels/multi_tensor_l2_norm.h"

#include "kernels/cpu/lane_sums.h"
#include "kernels/cpu/simd.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

namespace {

/// Prefetch distance of gradients in bytes. Latency limits a pass that only reads; with this
/// distance, two cores are nearly as fast as a plain copy.
constexpr std::int64_t kPrefetchBytes = 4096;

/// Sums one chunk, a tensor's elements [begin, end).
template <class T>
TORCHFUSE_INLINE NormPartial sum_chunk(const void* grad, DType dtype, std::int64_t begin,
                                       std::int64_t end) {
  using V = typename Simd<T>::V;
  constexpr std::int64_t kWidth = Simd<T>::kWidth;
  const std::int64_t size = static_cast<std::int64_t>(size_of(dtype));
  Sums<T> sums;
  V small[kLaneVectors<T>];
  for (V& vector : small) vector = V(T(0));
  const auto add = [&](const void* data, std::int64_t index) __attribute__((always_inline)) {
    V x[kLaneVectors<T>];
    V largest(T(0));
#pragma GCC unroll 16
    for (std::int64_t v = 0; v < kLaneVectors<T>; ++v) {
      x[v] = load(data, index + v * kWidth, dtype, T());
      largest = larger_magnitude(largest, x[v]);
    }
    add_lanes<T>(sums, small, x, largest);
  };
  std::int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    for (std::int64_t line = 0; line < kLanes * size; line += 64) {
      prefetch(grad, i * size + line + kPrefetchBytes);
    }
    add(grad, i);
  }
  if (i < end) {
    // Zeros past the end add nothing.
    alignas(64) char buffer[kLanes * sizeof(T)] = {};
    for (std::int64_t b = 0; b < (end - i) * size; ++b) {
      buffer[b] = static_cast<const char*>(grad)[i * size + b];
    }
    add(buffer, 0);
  }
  memcpy(sums.small, small, sizeof sums.small);
  return finish(sums);
}

template <class T>
TORCHFUSE_INLINE void sum_elements(const L2NormArgs& args, std::int64_t begin, std::int64_t end) {
  const TensorTable& table = args.tensors;
  for (std::int64_t t = find_row(table.offsets, table.count, begin);
       t < table.count && table.offsets[t] < end; ++t) {
    for_each_norm_chunk(table, t, begin, end,
                        [&](std::int64_t chunk, std::int64_t first, std::int64_t stop)
                            __attribute__((always_inline)) {
                              args.partials[args.chunk_offsets[t] + chunk] =
                                  sum_chunk<T>(table.rows[t].grad, table.grad, first, stop);
                            });
  }
}

}  // namespace

void multi_tensor_l2_norm(const L2NormArgs& args, std::int64_t begin, std::int64_t end) {
  if (begin >= end) return;
  if (args.tensors.grad == DType::kFloat64) {
    sum_elements<double>(args, begin, end);
  } else {
    const FlushDenormals flush;
    sum_elements<float>(args, begin, end);
  }
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
