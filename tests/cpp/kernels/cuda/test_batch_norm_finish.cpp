// SPDX-License-Identifier: BSD-3-Clause
// What the launch that writes the outputs keeps of the reduced moments: saved and running
// statistics and the number of batches, once for each channel, whatever the order of its blocks.
#include <gtest/gtest.h>

#include "batch_norm_problem.h"

namespace torchfuse::kernels {
namespace {

using namespace testing;

constexpr double kEps = 1e-3;
constexpr double kOldMean = 0.5;
constexpr double kOldVariance = 2.0;

struct Options {
  std::int64_t local_outer = -1;  ///< samples of this rank; -1: all
  double momentum = 0.25;
  bool cumulative = false;
  std::int64_t batches = 3;  ///< before; negative: not tracked
  bool empty = false;        ///< no rank has elements
  DType running = DType::kFloat32;
};

/// Mean and unbiased variance of each channel, which the running statistics move to.
struct Observed {
  std::vector<double> mean, variance;
};

/// Moments of a pretended batch of `count` elements, packed as the statistics kernel does.
std::vector<double> some_packed(std::int64_t channels, double count, Observed& observed) {
  std::vector<double> packed(static_cast<std::size_t>(packed_moments_size(channels)), 0.0);
  for (std::int64_t c = 0; c < channels; ++c) {
    const double mean = 0.125 * static_cast<double>(c % 7) - 0.25;
    const double m2 = count * (1.0 + 0.5 * static_cast<double>(c % 5));
    // Every sum is a short binary number: one part holds it.
    packed[static_cast<std::size_t>(c)] = count * mean;
    packed[static_cast<std::size_t>(2 * channels + c)] = count * mean * mean + m2;
    observed.mean.push_back(mean);
    observed.variance.push_back(m2 / (count - 1.0));
  }
  packed.back() = count;
  return packed;
}

/// Saved and running statistics of each channel.
void expect_channels(const Options& options, const Observed& observed,
                     const std::vector<double>& kept, const ChannelVector& mean,
                     const ChannelVector& variance, double count, double factor) {
  const auto channels = static_cast<std::int64_t>(kept.size() / 2);
  const double error = epsilon_of(options.running);
  for (std::int64_t c = 0; c < channels; ++c) {
    const auto at = static_cast<std::size_t>(c);
    const double saved_mean = kept[at];
    const double saved_invstd = kept[static_cast<std::size_t>(channels + c)];
    if (options.empty) {
      ASSERT_EQ(saved_mean, 0.0);
      ASSERT_NEAR(saved_invstd, 1.0 / std::sqrt(kEps), 1e-13);
      ASSERT_EQ(mean.device_value(c), kOldMean);
      ASSERT_EQ(variance.device_value(c), kOldVariance);
      continue;
    }
    const double biased = observed.variance[at] * (count - 1.0) / count;
    ASSERT_EQ(saved_mean, observed.mean[at]);
    ASSERT_NEAR(saved_invstd, 1.0 / std::sqrt(biased + kEps), 1e-15);
    ASSERT_NEAR(mean.device_value(c), (1.0 - factor) * kOldMean + factor * observed.mean[at],
                error);
    ASSERT_NEAR(variance.device_value(c),
                (1.0 - factor) * kOldVariance + factor * observed.variance[at], 4.0 * error);
  }
}

void expect_finished(BatchNormShape shape, const Options& options) {
  std::mt19937 random(1);
  Observed observed;
  const double count = options.empty ? 0.0 : 64.0;
  const auto channels = shape.channels;
  const DeviceArray<double> packed(
      options.empty ? std::vector<double>(static_cast<std::size_t>(packed_moments_size(channels)))
                    : some_packed(channels, count, observed));
  if (options.local_outer >= 0) shape.outer = options.local_outer;
  const ChannelTensor x = ChannelTensor::normal(shape, random);
  const ChannelTensor y(shape);
  const ChannelVector mean(options.running, channels, [] { return kOldMean; });
  const ChannelVector variance(options.running, channels, [] { return kOldVariance; });
  const DeviceArray<std::int64_t> batches({options.batches});
  const auto saved = DeviceArray<double>::unwritten(2 * channels + 1);
  const Workspace workspace(shape, 8);

  BatchNormFinishArgs finish;
  finish.channels = channels;
  finish.packed = packed.data();
  finish.running_mean = mean.output();
  finish.running_var = variance.output();
  if (options.batches >= 0) finish.num_batches_tracked = batches.data();
  finish.momentum = options.momentum;
  finish.cumulative = options.cumulative;
  finish.eps = kEps;
  finish.saved = saved.data();
  BatchNormElemtArgs args;
  args.shape = shape;
  args.input = x.input();
  args.output = y.data();
  expect_ok(batch_norm_elemt_cuda(args, finish, workspace.arrivals_alone(), stream()), workspace);

  const bool counts = options.batches >= 0;
  const std::vector<double> kept = saved.to_host();
  saved.expect_accesses(0, 1);
  EXPECT_EQ(kept.back(), count);
  EXPECT_EQ(batches.to_host()[0], options.batches + (counts && !options.empty ? 1 : 0));
  const double factor = options.cumulative && counts
                            ? 1.0 / static_cast<double>(options.batches + 1)
                            : options.momentum;
  expect_channels(options, observed, kept, mean, variance, count, factor);
  // Statistics that are read and written by more than one block would be moved twice.
  if (!options.empty) {
    mean.expect_accesses(1, 1);
    variance.expect_accesses(1, 1);
  }
}

/// Several tiles of several slices each; both layouts.
std::vector<BatchNormShape> shapes() {
  return {planes(DType::kFloat32, 30, 5, 130), rows(DType::kFloat16, 700, 67),
          rows(DType::kBFloat16, 70, 257), planes(DType::kFloat64, 7, 65, 3)};
}

TEST(CudaBatchNormFinish, SmallRunningStatisticsMoveOnce) {
  std::uint64_t seed = 0;
  for (const BatchNormShape& shape : shapes()) {
    SCOPED_TRACE(describe(shape));
    for (const DType running : kEveryDType) {
      Options options;
      options.running = running;
      options.batches = seed % 3 == 0 ? -1 : 7;
      set_order_for(shape.dtype, seed++, 3);
      expect_finished(shape, options);
    }
  }
}

TEST(CudaBatchNormFinish, SmallCumulativeAverageUsesTheNumberBeforeAnyBlockCounts) {
  for (const BatchNormShape& shape : shapes()) {
    SCOPED_TRACE(describe(shape));
    for (const std::uint64_t seed : {0, 1, 2, 3}) {
      for (const std::int64_t batches : {-1, 0, 1}) {
        Options options;
        options.cumulative = true;
        options.batches = batches;
        set_order_for(shape.dtype, seed, 4);
        expect_finished(shape, options);
      }
    }
  }
}

TEST(CudaBatchNormFinish, SmallRankWithoutElementsMovesItsStatisticsToo) {
  for (const BatchNormShape& shape : shapes()) {
    SCOPED_TRACE(describe(shape));
    Options options;
    options.local_outer = 0;
    set_order_for(shape.dtype, 1);
    expect_finished(shape, options);
    options.cumulative = true;
    expect_finished(shape, options);
  }
}

TEST(CudaBatchNormFinish, SmallBatchWithoutElementsIsNoObservation) {
  for (const BatchNormShape& shape : shapes()) {
    SCOPED_TRACE(describe(shape));
    Options options;
    options.empty = true;
    set_order_for(shape.dtype, 1);
    for (const bool cumulative : {false, true}) {
      options.cumulative = cumulative;
      expect_finished(shape, options);
      options.local_outer = 0;
    }
  }
}

}  // namespace
}  // namespace torchfuse::kernels
