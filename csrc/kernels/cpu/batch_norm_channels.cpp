// SPDX-License-Identifier: BSD-3-Clause
// The batch normalization computations on one number per channel, in fp64.
#include "kernels/batch_norm.h"
#include "kernels/batch_norm_backward.h"
#include "kernels/cpu/batch_norm_split.h"

namespace torchfuse::kernels {

namespace {

template <class T>
T* row(void* terms, std::int64_t index, std::int64_t channels) {
  return static_cast<T*>(terms) + index * channels;
}

template <class Args>
void fill_normalize_terms(const Args& args) {
  const std::int64_t channels = args.shape.channels;
  with_compute_type(args.shape.dtype, [&]<class T>(T) {
    for (std::int64_t c = 0; c < channels; ++c) {
      const auto terms =
          normalize_terms<T>(args.saved[c], args.saved[channels + c],
                             load_channel(args.weight, c, 1.0), load_channel(args.bias, c, 0.0));
      row<T>(args.terms, 0, channels)[c] = terms.center;
      row<T>(args.terms, 1, channels)[c] = terms.scale;
      row<T>(args.terms, 2, channels)[c] = terms.shift;
    }
  });
}

}  // namespace

std::int64_t batch_norm_partial_rows(const BatchNormShape& shape) {
  const cpu::BatchNormSplit split = cpu::split_of(shape);
  return split.outer_items * split.inner_items;
}

std::int64_t batch_norm_items(const BatchNormShape& shape) {
  return batch_norm_partial_rows(shape) * cpu::split_of(shape).channel_items;
}

void batch_norm_pack_cpu(const BatchNormStatsArgs& args, std::int64_t begin, std::int64_t end) {
  const BatchNormShape& shape = args.shape;
  const cpu::BatchNormSplit split = cpu::split_of(shape);
  const std::int64_t rows = split.outer_items * split.inner_items;
  constexpr std::int64_t kTogether = 64;
  for (std::int64_t first = begin; first < end; first += kTogether) {
    const std::int64_t count = cpu::smaller(kTogether, end - first);
    PivotedSums sums[kTogether];
    for (std::int64_t r = 0; r < rows; ++r) {
      const double elements = cpu::item_of(shape, split, r, 0).count();
      const double* partial = args.partials + (r * shape.channels + first) * kStatsPartial;
      for (std::int64_t i = 0; i < count; ++i, partial += kStatsPartial) {
        sums[i] = merge(sums[i], PivotedSums{partial[0], partial[1], partial[2], elements});
      }
    }
    for (std::int64_t i = 0; i < count; ++i) {
      pack_moments(moments_of(sums[i]), args.packed, first + i, shape.channels);
    }
  }
  if (begin == 0) {
    args.packed[4 * shape.channels] = static_cast<double>(shape.outer * shape.inner);
  }
}

void batch_norm_finish_cpu(const BatchNormFinishArgs& args) {
  const std::int64_t channels = args.channels;
  const bool running = args.packed == nullptr;
  const double count = running ? 0.0 : args.packed[4 * channels];
  double factor = args.momentum;
  if (count > 0.0 && args.num_batches_tracked != nullptr) {
    *args.num_batches_tracked += 1;
    if (args.cumulative) factor = 1.0 / static_cast<double>(*args.num_batches_tracked);
  }
  const ChannelOutput& mean = args.running_mean;
  const ChannelOutput& var = args.running_var;
  for (std::int64_t c = 0; c < channels; ++c) {
    if (running) {
      args.saved[c] = load_channel(mean.data, mean.dtype, c, 0.0);
      args.saved[channels + c] = inverse_std(load_channel(var.data, var.dtype, c, 1.0), args.eps);
      continue;
    }
    const Moments moments = unpack_moments(args.packed, c, channels);
    args.saved[c] = moments.mean;
    args.saved[channels + c] = inverse_std(biased_variance(moments), args.eps);
    // A batch without elements does not update the running statistics.
    if (count == 0.0) continue;
    store_channel(
        mean, c,
        running_average(load_channel(mean.data, mean.dtype, c, 0.0), moments.mean, factor));
    store_channel(var, c,
                  running_average(load_channel(var.data, var.dtype, c, 0.0),
                                  unbiased_variance(moments), factor));
  }
  args.saved[2 * channels] = count;
}

void batch_norm_elemt_terms_cpu(const BatchNormElemtArgs& args) { fill_normalize_terms(args); }

void batch_norm_backward_reduce_terms_cpu(const BatchNormBackwardReduceArgs& args) {
  fill_normalize_terms(args);
}

void batch_norm_backward_sum_cpu(const BatchNormBackwardReduceArgs& args, std::int64_t begin,
                                 std::int64_t end) {
  const std::int64_t channels = args.shape.channels;
  const std::int64_t rows = batch_norm_partial_rows(args.shape);
  with_compute_type(args.shape.dtype, [&]<class T>(T) {
    for (std::int64_t c = begin; c < end; ++c) {
      double dy = 0.0;
      double dy_deviation = 0.0;
      for (std::int64_t r = 0; r < rows; ++r) {
        const double* partial = args.partials + (r * channels + c) * kGradPartial;
        dy += partial[0];
        dy_deviation += partial[1];
      }
      const GradSums sums = grad_sums<T>(dy, dy_deviation, args.saved[c], args.saved[channels + c]);
      args.sums[c] = sums.dy;
      args.sums[channels + c] = sums.dy_xhat;
      store_channel(args.grad_weight, c, sums.dy_xhat);
      store_channel(args.grad_bias, c, sums.dy);
    }
  });
}

void batch_norm_backward_elemt_terms_cpu(const BatchNormBackwardElemtArgs& args) {
  fill_normalize_terms(args);
  const std::int64_t channels = args.shape.channels;
  with_compute_type(args.shape.dtype, [&]<class T>(T) {
    for (std::int64_t c = 0; c < channels; ++c) {
      const auto terms = grad_input_terms<T>(
          args.saved[c], args.saved[channels + c], load_channel(args.weight, c, 1.0),
          GradSums{args.sums[c], args.sums[channels + c]}, args.saved[2 * channels]);
      row<T>(args.terms, kNormalizeTerms, channels)[c] = terms.dy_scale;
      row<T>(args.terms, kNormalizeTerms + 1, channels)[c] = terms.deviation_scale;
      row<T>(args.terms, kNormalizeTerms + 2, channels)[c] = terms.constant;
    }
  });
}

}  // namespace torchfuse::kernels
