// SPDX-License-Identifier: BSD-3-Clause
// The outputs of batch normalization: the bits that its functor gives for the saved statistics,
// which are near the formula in fp64; every element read once and written once.
#include <gtest/gtest.h>

#include "batch_norm_problem.h"

namespace torchfuse::kernels {
namespace {

using namespace testing;

struct Options {
  bool residual = false;
  bool relu = false;
  bool affine = true;
  Strides input;
  Strides other;            ///< of the residual
  std::int64_t offset = 0;  ///< of the output
};

/// The output of one element, in its compute type.
template <class T>
double output_of(double x, double z, const Options& options, double mean, double invstd,
                 double weight, double bias) {
  const NormalizeTerms<T> terms = normalize_terms<T>(mean, invstd, weight, bias);
  T y = normalize(static_cast<T>(x) - terms.center, terms.scale, terms.shift);
  if (options.residual) y = y + static_cast<T>(z);
  if (options.relu) y = kernels::max(y, T(0));
  return static_cast<double>(y);
}

/// Runs the launch in evaluation mode, on running statistics that need not be the input's.
void expect_outputs(const BatchNormShape& shape, const Options& options, std::mt19937& random) {
  std::normal_distribution<double> normal;
  const auto near_one = [&] { return 1.0 + 0.3 * std::abs(normal(random)); };
  const auto around_zero = [&] { return normal(random); };
  const std::int64_t channels = shape.channels;
  const ChannelTensor x = ChannelTensor::normal(shape, random, 1.0, 2.0, options.input);
  const ChannelTensor z = ChannelTensor::normal(shape, random, 0.0, 1.0, options.other);
  ChannelTensor y(shape, {0, 0, options.offset});
  const ChannelVector mean(DType::kFloat32, channels, near_one);
  const ChannelVector variance(DType::kFloat64, channels, near_one);
  ChannelVector weight, bias;
  if (options.affine) weight = ChannelVector(DType::kFloat32, channels, near_one);
  if (options.affine) bias = ChannelVector(shape.dtype, channels, around_zero);
  const auto saved = DeviceArray<double>::unwritten(2 * channels + 1);
  const Workspace workspace(shape);

  BatchNormFinishArgs finish;
  finish.channels = channels;
  finish.running_mean = mean.output();
  finish.running_var = variance.output();
  finish.saved = saved.data();
  BatchNormElemtArgs args;
  args.shape = shape;
  args.input = x.input();
  if (options.residual) args.residual = z.input();
  args.weight = weight.input();
  args.bias = bias.input();
  args.relu = options.relu;
  args.output = y.data();
  expect_ok(batch_norm_elemt_cuda(args, finish, workspace.arrivals_alone(), stream()), workspace);

  if (options.input.channel_gap + options.input.outer_gap == 0) x.expect_accesses(1, 0);
  if (options.residual && options.other.outer_gap == 0) z.expect_accesses(1, 0);
  y.expect_accesses(0, 1);
  saved.expect_accesses(0, 1);
  y.download();
  const std::vector<double> kept = saved.to_host();
  ASSERT_EQ(kept.back(), 0.0);
  Buffer rounded(shape.dtype, 1);
  for_each_place(shape, [&](std::int64_t o, std::int64_t c, std::int64_t i) {
    const double m = kept[static_cast<std::size_t>(c)];
    const double invstd = kept[static_cast<std::size_t>(channels + c)];
    ASSERT_EQ(m, mean.get(c, 0.0));
    ASSERT_NEAR(invstd, 1.0 / std::sqrt(variance.get(c, 1.0) + 1e-5), 1e-15);
    const double w = weight.get(c, 1.0);
    const double b = bias.get(c, 0.0);
    const auto output = shape.dtype == DType::kFloat64 ? output_of<double> : output_of<float>;
    rounded.set(0, output(x.get(o, c, i), z.get(o, c, i), options, m, invstd, w, b));
    ASSERT_TRUE(same_value(y.get(o, c, i), rounded.get(0)))
        << y.get(o, c, i) << " instead of " << rounded.get(0) << " at " << o << ", " << c << ", "
        << i;
    double formula = (x.get(o, c, i) - m) / std::sqrt(variance.get(c, 1.0) + 1e-5) * w + b;
    if (options.residual) formula += z.get(o, c, i);
    if (options.relu) formula = std::max(formula, 0.0);
    ASSERT_NEAR(y.get(o, c, i), formula, 8.0 * epsilon_of(shape.dtype) * (4.0 + std::abs(formula)));
  });
}

TEST(CudaBatchNormElemt, EveryShapeHasTheFunctorsBits) {
  std::mt19937 random(1);
  std::uint64_t seed = 0;
  for (const BatchNormShape& shape : every_shape()) {
    SCOPED_TRACE(describe(shape));
    Options options;
    options.residual = seed % 2 == 1;
    options.relu = seed % 3 != 0;
    options.affine = seed % 5 != 0;
    set_order_for(shape.dtype, seed++);
    expect_outputs(shape, options, random);
  }
}

TEST(CudaBatchNormElemt, SmallStridedAndMisalignedTensorsHaveTheFunctorsBits) {
  std::mt19937 random(2);
  for (const DType dtype : kEveryDType) {
    const std::int64_t vec = elements_per_vector(dtype);
    for (const BatchNormShape& shape : {planes(dtype, 5, 3, 49), planes(dtype, 3, 3, 4 * vec),
                                        planes(dtype, 9, 5, 1), rows(dtype, 17, 2 * vec + 3)}) {
      for (std::int64_t offset = 0; offset < vec; ++offset) {
        SCOPED_TRACE(describe(shape) << ", offset " << offset);
        Options options;
        options.residual = options.relu = true;
        options.input = {offset % 3, offset, offset};
        options.other = {0, offset % 2 * vec, (3 * offset + 1) % vec};
        options.offset = (5 * offset) % vec;
        set_order_for(dtype, static_cast<std::uint64_t>(offset));
        expect_outputs(shape, options, random);
      }
    }
  }
}

TEST(CudaBatchNormElemt, MovesSixteenBytesAtATime) {
  if (!accesses_are_counted()) GTEST_SKIP() << "accesses are not counted";
  for (const DType dtype : kEveryDType) {
    const std::int64_t vec = elements_per_vector(dtype);
    for (const BatchNormShape& shape :
         {planes(dtype, 4, 3, 1024), planes(dtype, 9, 5, vec), rows(dtype, 50, 8 * vec)}) {
      // Planes may begin anywhere, as long as input and output do so alike.
      for (const std::int64_t offset : {std::int64_t{0}, vec - 1}) {
        if (offset != 0 && shape.inner != 1024) continue;
        SCOPED_TRACE(describe(shape) << ", offset " << offset);
        std::mt19937 random(3);
        const ChannelTensor x = ChannelTensor::normal(shape, random, 0.0, 1.0, {0, 0, offset});
        const ChannelTensor y(shape, {0, 0, offset});
        const Workspace workspace(shape);
        const auto saved = DeviceArray<double>::unwritten(2 * shape.channels + 1);
        BatchNormFinishArgs finish;
        finish.channels = shape.channels;
        finish.saved = saved.data();
        BatchNormElemtArgs args;
        args.shape = shape;
        args.input = x.input();
        args.output = y.data();
        set_order_for(dtype, 0);
        expect_ok(batch_norm_elemt_cuda(args, finish, workspace.arrivals_alone(), stream()),
                  workspace);
        const std::int64_t planes = shape.outer * shape.channels;
        const std::int64_t extra = offset == 0 ? 0 : planes * (vec - 1);
        const auto accesses = static_cast<std::size_t>(shape.numel() / vec + extra);
        EXPECT_EQ(x.device().loads(), accesses);
        EXPECT_EQ(y.device().stores(), accesses);
      }
    }
  }
}

TEST(CudaBatchNormElemt, SmallReluLetsNanPass) {
  for (const DType dtype : kEveryDType) {
    for (const BatchNormShape& shape : small_shapes(dtype)) {
      std::mt19937 random(4);
      ChannelTensor x = ChannelTensor::normal(shape, random);
      x.set(shape.outer - 1, 2, shape.inner - 1, std::nan(""));
      x.set(0, 2, 0, std::numeric_limits<double>::infinity());
      x.upload();
      ChannelTensor y(shape);
      const Workspace workspace(shape);
      const auto saved = DeviceArray<double>::unwritten(2 * shape.channels + 1);
      BatchNormFinishArgs finish;
      finish.channels = shape.channels;
      finish.saved = saved.data();
      BatchNormElemtArgs args;
      args.shape = shape;
      args.input = x.input();
      args.output = y.data();
      args.relu = true;
      set_order_for(dtype, 1);
      expect_ok(batch_norm_elemt_cuda(args, finish, workspace.arrivals_alone(), stream()),
                workspace);
      y.download();
      for_each_place(shape, [&](std::int64_t o, std::int64_t c, std::int64_t i) {
        ASSERT_EQ(std::isnan(y.get(o, c, i)), std::isnan(x.get(o, c, i)));
        ASSERT_EQ(std::isinf(y.get(o, c, i)), std::isinf(x.get(o, c, i)));
        ASSERT_FALSE(y.get(o, c, i) < 0.0);
      });
    }
  }
}

TEST(CudaBatchNormElemt, RefusesADTypeThatDoesNotExist) {
  BatchNormElemtArgs args;
  args.shape = planes(static_cast<DType>(9), 1, 1, 1);
  const Status status = batch_norm_elemt_cuda(args, {}, {}, stream());
  EXPECT_FALSE(status.ok());
  EXPECT_STREQ(status.what, "dtype of batch_norm_elemt");
}

}  // namespace
}  // namespace torchfuse::kernels
