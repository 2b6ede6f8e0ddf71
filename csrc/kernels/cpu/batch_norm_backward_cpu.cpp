// SPDX-License-Identifier: BSD-3-Clause
// Gradient sums (one read of gradient and input) and the input's gradient (the same reads, one
// write).
#include "kernels/batch_norm_backward.h"

#include "kernels/cpu/batch_norm_gradients.h"
#include "kernels/cpu/batch_norm_vectors.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

namespace {

/// Sums a channel's part of a plane item.
template <DType kDType, Gate kGate>
__attribute__((noinline)) void sum_planes(const BatchNormBackwardReduceArgs& args,
                                          const BatchNormItem& item, double* partial) {
  using E = ElementOf<kDType>;
  using T = ComputeOf<kDType>;
  using V = VectorOf<kDType>;
  constexpr std::int64_t kWidth = kWidthOf<kDType>;
  constexpr std::int64_t kVectors = kSumVectors<T>;
  const BatchNormShape& shape = args.shape;
  const std::int64_t c = item.channel_begin;
  const std::int64_t count = item.inner_end - item.inner_begin;
  const std::int64_t left = left_in_plane<kDType>(shape, item.inner_begin);
  const V center(*terms_row<T>(args.terms, 0, shape.channels, c));
  const V scale(*terms_row<T>(args.terms, 1, shape.channels, c));
  const V shift(*terms_row<T>(args.terms, 2, shape.channels, c));
  V sum[kVectors];
  V sum_deviation[kVectors];
#pragma GCC unroll 32
  for (std::int64_t v = 0; v < kVectors; ++v) sum[v] = sum_deviation[v] = V(T(0));
  /// Returns the gradient behind the ReLU.
  const auto add = [&](std::int64_t v, V dy, V x, V y) __attribute__((always_inline)) {
    const V deviation = x - center;
    const V passing = passed<kGate>(dy, deviation, y, scale, shift);
    sum[v] = sum[v] + passing;
    sum_deviation[v] = fma(passing, deviation, sum_deviation[v]);
    return passing;
  };
  for (std::int64_t o = item.outer_begin; o < item.outer_end; ++o) {
    const E* dy = run_of<kDType>(args.grad_output, o, c, item.inner_begin);
    const E* x = run_of<kDType>(args.input, o, c, item.inner_begin);
    const E* y = kGate == Gate::kOutput ? run_of<kDType>(args.output, o, c, item.inner_begin) : x;
    E* dz =
        grad_residual_at<kDType>(args, (o * shape.channels + c) * shape.inner + item.inner_begin);
    std::int64_t i = 0;
    const auto add_full = [&](std::int64_t v, std::int64_t at) __attribute__((always_inline)) {
      const V passing = add(v, load_vector<kDType>(dy + at), load_vector<kDType>(x + at),
                            load_vector<kDType>(y + at));
      if (kGate == Gate::kOutput && dz != nullptr) store_vector<kDType>(dz + at, passing);
    };
    for (; i + kSumLanes <= count; i += kSumLanes) {
      prefetch_planes<kGate>(dy + i, x + i, y + i, kSumLanes, left - i);
#pragma GCC unroll 32
      for (std::int64_t v = 0; v < kVectors; ++v) add_full(v, i + v * kWidth);
    }
    prefetch_planes<kGate>(dy + i, x + i, y + i, count - i, left - i);
    // Zero gradients past the end add nothing.
    for_each_lane_vector<T>(
        count - i,
        [&](std::int64_t v, std::int64_t offset)
            __attribute__((always_inline)) { add_full(v, i + offset); },
        [&](std::int64_t v, std::int64_t offset, std::int64_t left) __attribute__((always_inline)) {
          const std::int64_t at = i + offset;
          const V zero(T(0));
          const V passing =
              add(v, load_first<kDType>(dy + at, left, zero),
                  load_first<kDType>(x + at, left, center), load_first<kDType>(y + at, left, zero));
          if (kGate == Gate::kOutput && dz != nullptr) store_first<kDType>(dz + at, left, passing);
        });
  }
  partial[0] = sum_lanes<T>(sum);
  partial[1] = sum_lanes<T>(sum_deviation);
}

/// Sums a row item, with an accumulator per channel, kRowBlock rows at a time.
template <DType kDType, Gate kGate>
__attribute__((noinline)) void sum_rows(const BatchNormBackwardReduceArgs& args,
                                        const BatchNormItem& item, double* partials) {
  using E = ElementOf<kDType>;
  using T = ComputeOf<kDType>;
  using V = VectorOf<kDType>;
  const std::int64_t first = item.channel_begin;
  const std::int64_t channels = item.channel_end - first;
  alignas(64) T sum[kTileChannels] = {};
  alignas(64) T sum_deviation[kTileChannels] = {};
  const T* centers = terms_row<T>(args.terms, 0, args.shape.channels, first);
  const T* scales = terms_row<T>(args.terms, 1, args.shape.channels, first);
  const T* shifts = terms_row<T>(args.terms, 2, args.shape.channels, first);
  const bool far = fetches_far<kDType>(args.shape);
  const auto add_rows = [&](auto row_count, std::int64_t row) __attribute__((always_inline)) {
    constexpr std::int64_t kRows = decltype(row_count)::value;
    const E* dy = run_of<kDType>(args.grad_output, row, first, 0);
    const E* x = run_of<kDType>(args.input, row, first, 0);
    const E* y = kGate == Gate::kOutput ? run_of<kDType>(args.output, row, first, 0) : x;
    const std::int64_t dy_stride = args.grad_output.outer_stride;
    const std::int64_t x_stride = args.input.outer_stride;
    const std::int64_t y_stride = kGate == Gate::kOutput ? args.output.outer_stride : x_stride;
    E* dz = grad_residual_at<kDType>(args, row * args.shape.channels + first);
    std::int64_t c = 0;
    for (; c + kWidthOf<kDType> <= channels; c += kWidthOf<kDType>) {
      V s(T(0));
      V d(T(0));
      const V center = load_terms(centers + c);
#pragma GCC unroll 8
      for (std::int64_t r = 0; r < kRows; ++r) {
        prefetch_block<kDType, kGate, kRows>(args, dy, x, y, channels, r, c, far);
        const V deviation = load_vector<kDType>(x + r * x_stride + c) - center;
        const V passing = passed<kGate>(load_vector<kDType>(dy + r * dy_stride + c), deviation,
                                        load_vector<kDType>(y + r * y_stride + c),
                                        load_terms(scales + c), load_terms(shifts + c));
        if (kGate == Gate::kOutput && dz != nullptr) {
          store_vector<kDType>(dz + r * args.shape.channels + c, passing);
        }
        s = s + passing;
        d = fma(passing, deviation, d);
      }
      store_terms(sum + c, load_terms(sum + c) + s);
      store_terms(sum_deviation + c, load_terms(sum_deviation + c) + d);
    }
    for (; c < channels; ++c) {
      T s(0);
      T d(0);
      for (std::int64_t r = 0; r < kRows; ++r) {
        const T deviation = load_one(x + r * x_stride + c) - centers[c];
        const T passing = passed<kGate>(load_one(dy + r * dy_stride + c), deviation,
                                        load_one(y + r * y_stride + c), scales[c], shifts[c]);
        if (dz != nullptr) store_one(dz + r * args.shape.channels + c, passing);
        s = s + passing;
        d = kernels::fma(passing, deviation, d);
      }
      sum[c] = sum[c] + s;
      sum_deviation[c] = sum_deviation[c] + d;
    }
  };
  for_each_row_block<kRowBlock>(item.outer_begin, item.outer_end, add_rows);
  store_partials(sum, sum_deviation, channels, partials);
}

template <DType kDType, bool kRelu>
TORCHFUSE_INLINE void write_grad_input(const BatchNormBackwardElemtArgs& args, std::int64_t begin,
                                       std::int64_t end) {
  const ElementPass pass{args.shape, args.grad_output, args.input, args.terms, args.grad_input};
  write_elements<kDType, /*kHasSecond=*/true, kNormalizeTerms + kGradInputTerms>(
      pass, begin, end, [](auto dy, auto x, const auto& t) __attribute__((always_inline)) {
        return grad_input_of<kRelu>(dy, x, t[0], t[1], t[2], t[3], t[4], t[5]);
      });
}

template <DType kDType, Gate kGate>
TORCHFUSE_INLINE void sum_items(const BatchNormBackwardReduceArgs& args, std::int64_t begin,
                                std::int64_t end) {
  const BatchNormSplit split = split_of(args.shape);
  for (std::int64_t i = begin; i < end; ++i) {
    const BatchNormItem item = item_of(args.shape, split, i);
    double* partials = args.partials +
                       (item.partial_row * args.shape.channels + item.channel_begin) * kGradPartial;
    if (args.shape.channels_last) {
      sum_rows<kDType, kGate>(args, item, partials);
    } else {
      sum_planes<kDType, kGate>(args, item, partials);
    }
  }
}

}  // namespace

void batch_norm_backward_reduce(const BatchNormBackwardReduceArgs& args, std::int64_t begin,
                                std::int64_t end) {
  with_dtype(args.shape.dtype, [&]<DType kDType>() __attribute__((always_inline)) {
    if (!args.relu) return sum_items<kDType, Gate::kOpen>(args, begin, end);
    if (args.output.data == nullptr) return sum_items<kDType, Gate::kComputed>(args, begin, end);
    sum_items<kDType, Gate::kOutput>(args, begin, end);
  });
}

void batch_norm_backward_elemt(const BatchNormBackwardElemtArgs& args, std::int64_t begin,
                               std::int64_t end) {
  with_dtype(args.shape.dtype, [&]<DType kDType>() __attribute__((always_inline)) {
    if (args.relu) return write_grad_input<kDType, true>(args, begin, end);
    write_grad_input<kDType, false>(args, begin, end);
  });
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
