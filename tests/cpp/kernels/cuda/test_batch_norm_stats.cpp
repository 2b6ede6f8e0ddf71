// SPDX-License-Identifier: BSD-3-Clause
// The statistics of batch normalization: every element counted once, exact at any mean, the same
// bits always.
#include <gtest/gtest.h>

#include "batch_norm_problem.h"
#include "kernels/cuda/batch_norm_grid.h"

namespace torchfuse::kernels {
namespace {

using namespace testing;

void expect_moments(const BatchNormShape& shape, const ChannelTensor& x,
                    const std::vector<double>& packed) {
  ASSERT_EQ(packed.back(), static_cast<double>(shape.outer * shape.inner));
  const double error = sum_error(shape.dtype);
  for (std::int64_t c = 0; c < shape.channels; ++c) {
    const ChannelMoments expected = moments_of_channel(shape, x, c);
    const ChannelMoments got = moments_of_packed(packed, c);
    const double sigma = std::sqrt(static_cast<double>(expected.variance));
    const double mean = static_cast<double>(expected.mean);
    ASSERT_NEAR(static_cast<double>(got.mean - expected.mean), 0.0,
                error * sigma + 0x1p-50 * std::abs(mean))
        << "mean of channel " << c;
    ASSERT_NEAR(static_cast<double>(got.variance - expected.variance), 0.0,
                error * sigma * sigma + 0x1p-70 * mean * mean)
        << "variance of channel " << c;
  }
}

TEST(CudaBatchNormStats, EveryShapeHasItsMoments) {
  std::mt19937 random(1);
  std::uint64_t seed = 0;
  for (const BatchNormShape& shape : every_shape()) {
    SCOPED_TRACE(describe(shape));
    const ChannelTensor x = ChannelTensor::normal(shape, random, 2.0, 3.0);
    set_order_for(shape.dtype, seed++);
    expect_moments(shape, x, stats_of(shape, x));
    x.expect_accesses(1, 0);
  }
}

TEST(CudaBatchNormStats, ALargeMeanCostsNothing) {
  std::mt19937 random(2);
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    for (const BatchNormShape& shape : {planes(dtype, 30, 5, 49), rows(dtype, 3000, 20)}) {
      SCOPED_TRACE(describe(shape));
      const ChannelTensor x = ChannelTensor::normal(shape, random, 1e4, 1.0);
      set_order_for(dtype, 1);
      expect_moments(shape, x, stats_of(shape, x));
    }
  }
}

TEST(CudaBatchNormStats, SumsBeyondTheRangeOfFp32AreExact) {
  // Squares of 511 add up exactly in fp32 as long as there are no more than 64 of them.
  constexpr std::int64_t kElements = 6 * 256 * 200;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16}) {
    const std::int64_t vec = elements_per_vector(dtype);
    for (const BatchNormShape& shape :
         {planes(dtype, 1, 1, kElements * vec), rows(dtype, kElements, vec)}) {
      SCOPED_TRACE(describe(shape));
      ChannelTensor x(shape);
      double ones = 0.0;
      for_each_place(shape, [&](std::int64_t o, std::int64_t c, std::int64_t i) {
        const bool one = (o + i) % 7 > 1;
        if (c == 0 && one) ones += 1.0;
        x.set(o, c, i, one ? 511.0 : 0.0);
      });
      x.upload();
      set_order_for(dtype, 1);
      const std::vector<double> packed = stats_of(shape, x);
      const double share = ones / static_cast<double>(shape.outer * shape.inner);
      const double variance = 511.0 * 511.0 * share * (1.0 - share);
      for (std::int64_t c = 0; c < shape.channels; ++c) {
        const ChannelMoments got = moments_of_packed(packed, c);
        ASSERT_NEAR(static_cast<double>(got.mean), 511.0 * share, 1e-12);
        ASSERT_NEAR(static_cast<double>(got.variance), variance, 1e-13 * variance);
      }
    }
  }
}

TEST(CudaBatchNormStats, SmallStridedInputHasItsMoments) {
  std::mt19937 random(3);
  for (const DType dtype : kEveryDType) {
    for (const BatchNormShape& shape :
         {planes(dtype, 9, 3, 49), planes(dtype, 9, 3, 64), rows(dtype, 70, 19)}) {
      for (const Strides& strides : {Strides{5, 0, 0}, Strides{0, 3, 0}, Strides{16, 32, 0},
                                     Strides{0, 0, 1}, Strides{1, 1, 1}}) {
        SCOPED_TRACE(describe(shape) << ", gaps " << strides.channel_gap << " and "
                                     << strides.outer_gap << ", offset " << strides.offset);
        const ChannelTensor x = ChannelTensor::normal(shape, random, 1.0, 1.0, strides);
        set_order_for(dtype, 2);
        expect_moments(shape, x, stats_of(shape, x));
      }
    }
  }
}

TEST(CudaBatchNormStats, SmallInputHasTheSameBitsAtAnyAddressInAnyOrderOfExecution) {
  for (const DType dtype : kEveryDType) {
    for (const BatchNormShape& shape : small_shapes(dtype)) {
      SCOPED_TRACE(describe(shape));
      std::vector<double> expected;
      const std::int64_t vec = elements_per_vector(dtype);
      for (std::int64_t trial = 0; trial < vec + 3; ++trial) {
        std::mt19937 random(4);
        const ChannelTensor x = ChannelTensor::normal(shape, random, 5.0, 1.0, {0, 0, trial % vec});
        set_order_for(dtype, static_cast<std::uint64_t>(trial), 1u << trial % 3);
        const std::vector<double> packed = stats_of(shape, x);
        x.expect_accesses(1, 0);
        if (trial == 0) expected = packed;
        ASSERT_EQ(std::memcmp(packed.data(), expected.data(), packed.size() * sizeof(double)), 0)
            << "trial " << trial;
      }
    }
  }
}

/// Load instructions for a dense, aligned tensor: 16 bytes each, single elements at the borders of
/// planes that do not fall on 16 bytes and behind the last vector of a row.
std::size_t expected_loads(const BatchNormShape& shape) {
  const std::int64_t vec = elements_per_vector(shape.dtype);
  const std::int64_t run = shape.channels_last ? shape.channels : shape.inner;
  const std::int64_t runs = shape.channels_last ? shape.outer : shape.outer * shape.channels;
  std::int64_t loads = 0;
  for (std::int64_t r = 0; r < runs; ++r) {
    const std::int64_t past = r * run % vec;
    if (shape.channels_last) {
      loads += run / vec * (past == 0 ? 1 : 0) + run % vec;
      continue;
    }
    const std::int64_t head = std::min((vec - past) % vec, run);
    loads += head + (run - head) / vec + (run - head) % vec;
  }
  return static_cast<std::size_t>(loads);
}

TEST(CudaBatchNormStats, ReadsSixteenBytesAtATime) {
  if (!accesses_are_counted()) GTEST_SKIP() << "accesses are not counted";
  std::mt19937 random(6);
  for (const DType dtype : kEveryDType) {
    const std::int64_t vec = elements_per_vector(dtype);
    for (const BatchNormShape& shape :
         {planes(dtype, 4, 3, 1024), planes(dtype, 4, 5, 49), planes(dtype, 3, 2, 14 * 14),
          planes(dtype, 5, 6, 4), rows(dtype, 50, 8 * vec), rows(dtype, 9, 256 * vec)}) {
      SCOPED_TRACE(describe(shape));
      const ChannelTensor x = ChannelTensor::normal(shape, random);
      set_order_for(dtype, 3);
      stats_of(shape, x);
      EXPECT_EQ(x.device().loads(), expected_loads(shape));
    }
  }
}

TEST(CudaBatchNormStats, SmallEmptyInputGivesZeros) {
  for (const DType dtype : kEveryDType) {
    for (const BatchNormShape& shape :
         {planes(dtype, 0, 5, 49), planes(dtype, 3, 5, 0), rows(dtype, 0, 70)}) {
      set_order_for(dtype, 0);
      for (const double number : stats_of(shape, ChannelTensor(shape))) {
        ASSERT_TRUE(same_value(number, 0.0)) << number;
      }
    }
  }
}

TEST(CudaBatchNormStats, SmallNonfiniteElementsSpoilTheirChannelAlone) {
  std::mt19937 random(7);
  const double infinity = std::numeric_limits<double>::infinity();
  for (const DType dtype : kEveryDType) {
    for (const BatchNormShape& shape : small_shapes(dtype)) {
      for (const double value : {infinity, -infinity, std::nan("")}) {
        for (const std::int64_t at : {std::int64_t{0}, shape.outer - 1}) {
          ChannelTensor x = ChannelTensor::normal(shape, random);
          x.set(at, 1, shape.inner - 1, value);
          x.upload();
          set_order_for(dtype, 4);
          const std::vector<double> packed = stats_of(shape, x);
          for (std::int64_t c = 0; c < shape.channels; ++c) {
            const ChannelMoments moments = moments_of_packed(packed, c);
            ASSERT_EQ(std::isfinite(static_cast<double>(moments.variance)), c != 1)
                << "channel " << c;
            ASSERT_EQ(std::isfinite(static_cast<double>(moments.mean)), c != 1) << "channel " << c;
          }
        }
      }
    }
  }
}

TEST(CudaBatchNormStats, GridsFitTheirWorkspaceAndFillTheDevice) {
  for (const int multiprocessors : {1, 20, 132}) {
    for (const DType dtype : kEveryDType) {
      for (std::int64_t channels = 1; channels <= 2100; channels += channels < 40 ? 1 : 103) {
        for (const BatchNormShape& shape :
             {planes(dtype, 64, channels, 49), planes(dtype, 1, channels, 1 << 22),
              rows(dtype, 1 << 20, channels), planes(dtype, 1 << 20, channels, 1)}) {
          SCOPED_TRACE(describe(shape) << " on " << multiprocessors);
          const std::int64_t resident = 4 * multiprocessors;
          const BatchNormInput stream{nullptr, channels * shape.inner, shape.inner};
          const cuda::BatchNormGrid grid =
              cuda::batch_norm_grid(shape, stream, cuda::BatchNormPass::kSums, resident);
          ASSERT_LE(4 * grid.slices * channels,
                    batch_norm_workspace_partials(shape, multiprocessors));
          ASSERT_LE(grid.tiles, batch_norm_workspace_arrivals(shape));
          ASSERT_EQ(grid.lanes * grid.columns * grid.rows, cuda::kGridThreads);
          ASSERT_GE(grid.slices * grid.slice_units, grid.units);
          ASSERT_LE(grid.columns * (shape.channels_last ? elements_per_vector(dtype) : 1), 32);
          // Where there is work for it, the last wave is more than half full, and the waves
          // together by two thirds.
          if (shape.outer * shape.inner >= 1 << 20) {
            const std::int64_t waves = (grid.blocks() + resident - 1) / resident;
            ASSERT_GT(2 * grid.blocks(), resident);
            ASSERT_GE(3 * grid.blocks(), 2 * waves * resident);
          }
        }
      }
    }
  }
}

TEST(CudaBatchNormStats, RefusesADTypeThatDoesNotExistAndAGridThatIsTooLarge) {
  const BatchNormShape shape = planes(static_cast<DType>(9), 1, 1, 1);
  expect_refused(batch_norm_stats_cuda({shape, {}, nullptr, nullptr}, {}, stream()),
                 "dtype of batch_norm_stats");
  const BatchNormShape wide = planes(DType::kFloat32, 1, std::int64_t{1} << 33, 1024);
  expect_refused(batch_norm_stats_cuda({wide, {}, nullptr, nullptr}, {}, stream()),
                 "launch of batch_norm_stats_kernel");
}

}  // namespace
}  // namespace torchfuse::kernels
