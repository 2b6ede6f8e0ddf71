// SPDX-License-Identifier: BSD-3-Clause
// Local statistics (one read) and the output (one read, one write).
#include "kernels/batch_norm.h"

#include "kernels/cpu/batch_norm_vectors.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

namespace {

// Sums are taken about the first element of each item and channel. This needs one pass and no
// division, and a large mean cannot cause cancellation.

/// Sums a channel's part of a plane item. 2, 4 or 8 bytes per element.
template <DType kDType>
__attribute__((noinline)) void sum_planes(const BatchNormStatsArgs& args, const BatchNormItem& item,
                                          double* partial) {
  using E = ElementOf<kDType>;
  using T = ComputeOf<kDType>;
  using V = VectorOf<kDType>;
  constexpr std::int64_t kWidth = kWidthOf<kDType>;
  constexpr std::int64_t kVectors = kSumVectors<T>;
  const std::int64_t c = item.channel_begin;
  const std::int64_t count = item.inner_end - item.inner_begin;
  const std::int64_t left = left_in_plane<kDType>(args.shape, item.inner_begin);
  const E first = *run_of<kDType>(args.input, item.outer_begin, c, item.inner_begin);
  const V pivot(load_one(&first));
  V sum[kVectors];
  V sum_sq[kVectors];
#pragma GCC unroll 32
  for (std::int64_t v = 0; v < kVectors; ++v) sum[v] = sum_sq[v] = V(T(0));
  const auto add = [&](std::int64_t v, V x) __attribute__((always_inline)) {
    const V deviation = x - pivot;
    sum[v] = sum[v] + deviation;
    sum_sq[v] = fma(deviation, deviation, sum_sq[v]);
  };
  for (std::int64_t o = item.outer_begin; o < item.outer_end; ++o) {
    const E* x = run_of<kDType>(args.input, o, c, item.inner_begin);
    std::int64_t i = 0;
    for (; i + kSumLanes <= count; i += kSumLanes) {
      prefetch_plane(x + i, kSumLanes, left - i);
#pragma GCC unroll 32
      for (std::int64_t v = 0; v < kVectors; ++v) add(v, load_vector<kDType>(x + i + v * kWidth));
    }
    prefetch_plane(x + i, count - i, left - i);
    // Pivots past the end add nothing.
    for_each_lane_vector<T>(
        count - i,
        [&](std::int64_t v, std::int64_t offset)
            __attribute__((always_inline)) { add(v, load_vector<kDType>(x + i + offset)); },
        [&](std::int64_t v, std::int64_t offset, std::int64_t left) __attribute__((always_inline)) {
          add(v, load_first<kDType>(x + i + offset, left, pivot));
        });
  }
  partial[0] = static_cast<double>(load_one(&first));
  partial[1] = sum_lanes<T>(sum);
  partial[2] = sum_lanes<T>(sum_sq);
}

/// Sums a row item, with an accumulator per channel. kRowBlock rows are summed first and then
/// added, because shorter chains of additions round less.
template <DType kDType>
__attribute__((noinline)) void sum_rows(const BatchNormStatsArgs& args, const BatchNormItem& item,
                                        double* partials) {
  using E = ElementOf<kDType>;
  using T = ComputeOf<kDType>;
  using V = VectorOf<kDType>;
  constexpr std::int64_t kWidth = kWidthOf<kDType>;
  const std::int64_t channels = item.channel_end - item.channel_begin;
  alignas(64) T pivots[kTileChannels];
  alignas(64) T sum[kTileChannels] = {};
  alignas(64) T sum_sq[kTileChannels] = {};
  const E* first = run_of<kDType>(args.input, item.outer_begin, item.channel_begin, 0);
  for (std::int64_t c = 0; c < channels; ++c) pivots[c] = load_one(first + c);
  const std::int64_t stride = args.input.outer_stride;
  const bool far = fetches_far<kDType>(args.shape);
  const auto add_rows = [&](auto row_count, std::int64_t row) __attribute__((always_inline)) {
    constexpr std::int64_t kRows = decltype(row_count)::value;
    const E* x = run_of<kDType>(args.input, row, item.channel_begin, 0);
    std::int64_t c = 0;
    for (; c + kWidth <= channels; c += kWidth) {
      const V pivot = load_terms(pivots + c);
      V s(T(0));
      V q(T(0));
#pragma GCC unroll 8
      for (std::int64_t r = 0; r < kRows; ++r) {
        prefetch_rows<kRows, kWidth>(x, args.input, channels, r, c, far);
        const V deviation = load_vector<kDType>(x + r * stride + c) - pivot;
        s = s + deviation;
        q = fma(deviation, deviation, q);
      }
      store_terms(sum + c, load_terms(sum + c) + s);
      store_terms(sum_sq + c, load_terms(sum_sq + c) + q);
    }
    for (; c < channels; ++c) {
      T s(0);
      T q(0);
      for (std::int64_t r = 0; r < kRows; ++r) {
        const T deviation = load_one(x + r * stride + c) - pivots[c];
        s = s + deviation;
        q = kernels::fma(deviation, deviation, q);
      }
      sum[c] = sum[c] + s;
      sum_sq[c] = sum_sq[c] + q;
    }
  };
  for_each_row_block<kRowBlock>(item.outer_begin, item.outer_end, add_rows);
  for (std::int64_t c = 0; c < channels; ++c) {
    partials[c * kStatsPartial] = static_cast<double>(pivots[c]);
    partials[c * kStatsPartial + 1] = static_cast<double>(sum[c]);
    partials[c * kStatsPartial + 2] = static_cast<double>(sum_sq[c]);
  }
}

/// Returns the output for a vector or an element.
template <bool kResidual, bool kRelu, class V>
TORCHFUSE_INLINE V output_of(V x, V residual, V center, V scale, V shift) {
  V y = normalize(x - center, scale, shift);
  if constexpr (kResidual) y = y + residual;
  if constexpr (kRelu) y = max(y, V(typename ScalarOf<V>::Type(0)));
  return y;
}

template <DType kDType, bool kResidual, bool kRelu>
TORCHFUSE_INLINE void write_output(const BatchNormElemtArgs& args, std::int64_t begin,
                                   std::int64_t end) {
  const ElementPass pass{args.shape, args.input, args.residual, args.terms, args.output};
  write_elements<kDType, kResidual, kNormalizeTerms>(
      pass, begin, end, [](auto x, auto residual, const auto& t) __attribute__((always_inline)) {
        return output_of<kResidual, kRelu>(x, residual, t[0], t[1], t[2]);
      });
}

}  // namespace

void batch_norm_stats(const BatchNormStatsArgs& args, std::int64_t begin, std::int64_t end) {
  const BatchNormSplit split = split_of(args.shape);
  with_dtype(args.shape.dtype, [&]<DType kDType>() __attribute__((always_inline)) {
    for (std::int64_t i = begin; i < end; ++i) {
      const BatchNormItem item = item_of(args.shape, split, i);
      double* partials =
          args.partials +
          (item.partial_row * args.shape.channels + item.channel_begin) * kStatsPartial;
      if (args.shape.channels_last) {
        sum_rows<kDType>(args, item, partials);
      } else {
        sum_planes<kDType>(args, item, partials);
      }
    }
  });
}

void batch_norm_elemt(const BatchNormElemtArgs& args, std::int64_t begin, std::int64_t end) {
  const bool residual = args.residual.data != nullptr;
  with_dtype(args.shape.dtype, [&]<DType kDType>() __attribute__((always_inline)) {
    if (residual && args.relu) return write_output<kDType, true, true>(args, begin, end);
    if (residual) return write_output<kDType, true, false>(args, begin, end);
    if (args.relu) return write_output<kDType, false, true>(args, begin, end);
    write_output<kDType, false, false>(args, begin, end);
  });
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
