// SPDX-License-Identifier: BSD-3-Clause
// The backward pass of batch normalisation: gradient sums against fp64, the input's gradient as its
// functor gives it, every element read once and written once.
#include <gtest/gtest.h>

#include "batch_norm_problem.h"

namespace torchfuse::kernels {
namespace {

using namespace testing;

enum class Relu { kNone, kFromInput, kFromOutput };

/// A batch, its saved statistics, and everything that the two launches write.
struct Problem {
  BatchNormShape shape;
  Relu relu = Relu::kNone;
  Strides strides;  ///< of the gradient
  std::int64_t offset = 0;
  ChannelTensor x, dy, y;
  ChannelVector weight, bias;
  std::vector<double> saved;

  Problem(const BatchNormShape& shape_, Relu relu_, std::mt19937& random,
          const Strides& strides_ = {}, std::int64_t offset_ = 0, double count = 100.0)
      : shape(shape_),
        relu(relu_),
        strides(strides_),
        offset(offset_),
        x(ChannelTensor::normal(shape, random, 3.0, 2.0, {0, 0, offset})),
        dy(ChannelTensor::normal(shape, random, 0.1, 1.0, strides)),
        y(ChannelTensor::normal(shape, random, 0.0, 1.0)) {
    std::normal_distribution<double> normal;
    const auto near_one = [&] { return 1.0 + 0.3 * std::abs(normal(random)); };
    weight = ChannelVector(DType::kFloat32, shape.channels, near_one);
    bias = ChannelVector(DType::kFloat32, shape.channels, [&] { return normal(random); });
    for (std::int64_t c = 0; c < shape.channels; ++c) saved.push_back(3.0 + 0.1 * normal(random));
    for (std::int64_t c = 0; c < shape.channels; ++c) saved.push_back(0.5 * near_one());
    saved.push_back(count);
  }

  double mean(std::int64_t c) const { return saved[static_cast<std::size_t>(c)]; }
  double invstd(std::int64_t c) const {
    return saved[static_cast<std::size_t>(shape.channels + c)];
  }

  /// The gradient behind the ReLU. Its gate is the functor's, which decides about every sign.
  template <class T>
  double passing(std::int64_t o, std::int64_t c, std::int64_t i) const {
    double gate = 1.0;
    if (relu == Relu::kFromOutput) gate = y.get(o, c, i);
    if (relu == Relu::kFromInput) {
      const auto terms =
          normalize_terms<T>(mean(c), invstd(c), weight.get(c, 1.0), bias.get(c, 0.0));
      gate = static_cast<double>(
          normalize(static_cast<T>(x.get(o, c, i)) - terms.center, terms.scale, terms.shift));
    }
    return gate <= 0.0 ? 0.0 : dy.get(o, c, i);
  }
  double passing(std::int64_t o, std::int64_t c, std::int64_t i) const {
    return shape.dtype == DType::kFloat64 ? passing<double>(o, c, i) : passing<float>(o, c, i);
  }
};

/// What the reduction gives.
struct Reduced {
  std::vector<double> sums;
  Buffer grad_weight;
  Buffer grad_bias;
  Buffer grad_residual;
};

Reduced reduce(const Problem& problem, bool writes) {
  const BatchNormShape& shape = problem.shape;
  const Workspace workspace(shape);
  const DeviceArray<double> saved(problem.saved);
  const DeviceArray<double> sums(nans(2 * shape.channels));
  const ChannelVector grad_weight(DType::kFloat32, shape.channels, [] { return 9.0; });
  const ChannelVector grad_bias(shape.dtype, shape.channels, [] { return 9.0; });
  ChannelTensor grad_residual(shape, {0, 0, (problem.offset + 1) % 2});
  problem.x.device().upload(problem.x.host().data());
  problem.dy.device().upload(problem.dy.host().data());
  problem.y.device().upload(problem.y.host().data());
  BatchNormBackwardReduceArgs args;
  args.shape = shape;
  args.grad_output = problem.dy.input();
  args.input = problem.x.input();
  if (problem.relu == Relu::kFromOutput) args.output = problem.y.input();
  args.weight = problem.weight.input();
  args.bias = problem.bias.input();
  args.relu = problem.relu != Relu::kNone;
  args.saved = saved.data();
  args.sums = sums.data();
  args.grad_weight = grad_weight.output();
  args.grad_bias = grad_bias.output();
  if (writes) args.grad_residual = grad_residual.data();
  expect_ok(batch_norm_backward_reduce_cuda(args, workspace.get(), stream()), workspace);
  problem.x.expect_accesses(1, 0);
  if (problem.strides.channel_gap + problem.strides.outer_gap == 0) {
    problem.dy.expect_accesses(1, 0);
  }
  problem.y.expect_accesses(problem.relu == Relu::kFromOutput ? 1 : 0, 0);
  grad_residual.expect_accesses(0, writes ? 1 : 0);
  grad_residual.download();
  sums.expect_accesses(0, 1);
  grad_weight.expect_accesses(0, 1);
  grad_bias.expect_accesses(0, 1);
  const auto vector_of = [&](const ChannelVector& vector, DType dtype) {
    Buffer buffer(dtype, shape.channels);
    for (std::int64_t c = 0; c < shape.channels; ++c) buffer.set(c, vector.device_value(c));
    return buffer;
  };
  return {sums.to_host(), vector_of(grad_weight, DType::kFloat32),
          vector_of(grad_bias, shape.dtype), grad_residual.host()};
}

void expect_reduced(const Problem& problem, const Reduced& got, bool writes) {
  const BatchNormShape& shape = problem.shape;
  const auto channels = static_cast<std::size_t>(shape.channels);
  std::vector<double> dy(channels), dy_xhat(channels), size(channels), size_xhat(channels);
  for_each_place(shape, [&](std::int64_t o, std::int64_t c, std::int64_t i) {
    const auto at = static_cast<std::size_t>(c);
    const double passing = problem.passing(o, c, i);
    const double xhat = (problem.x.get(o, c, i) - problem.mean(c)) * problem.invstd(c);
    dy[at] += passing, size[at] += std::abs(passing);
    dy_xhat[at] += passing * xhat, size_xhat[at] += std::abs(passing * xhat);
    if (writes) {
      const std::int64_t place = (o * shape.channels + c) * shape.inner + i;
      ASSERT_EQ(got.grad_residual.get(place), passing) << o << ", " << c << ", " << i;
    }
  });
  const double error = sum_error(shape.dtype);
  Buffer rounded_weight(DType::kFloat32, 1), rounded_bias(shape.dtype, 1);
  for (std::size_t c = 0; c < channels; ++c) {
    const double sum_dy = got.sums[c], sum_xhat = got.sums[channels + c];
    ASSERT_NEAR(sum_dy, dy[c], error * size[c]) << "channel " << c;
    ASSERT_NEAR(sum_xhat, dy_xhat[c], error * (size_xhat[c] + size[c])) << "channel " << c;
    rounded_weight.set(0, sum_xhat);
    rounded_bias.set(0, sum_dy);
    ASSERT_EQ(got.grad_weight.get(static_cast<std::int64_t>(c)), rounded_weight.get(0));
    ASSERT_EQ(got.grad_bias.get(static_cast<std::int64_t>(c)), rounded_bias.get(0));
  }
}

template <class T>
double grad_input_of(const Problem& problem, const std::vector<double>& sums, std::int64_t o,
                     std::int64_t c, std::int64_t i) {
  const std::int64_t channels = problem.shape.channels;
  const auto terms = grad_input_terms<T>(
      problem.mean(c), problem.invstd(c), problem.weight.get(c, 1.0),
      {sums[static_cast<std::size_t>(c)], sums[static_cast<std::size_t>(channels + c)]},
      problem.saved.back());
  const T deviation = static_cast<T>(problem.x.get(o, c, i)) - static_cast<T>(problem.mean(c));
  return static_cast<double>(grad_input(static_cast<T>(problem.passing(o, c, i)), deviation,
                                        terms.dy_scale, terms.deviation_scale, terms.constant));
}

void expect_grad_input(const Problem& problem, const std::vector<double>& sums) {
  const BatchNormShape& shape = problem.shape;
  const Workspace workspace(shape);
  const DeviceArray<double> device_saved(problem.saved), device_sums(sums);
  ChannelTensor dx(shape, {0, 0, (2 * problem.offset + 1) % elements_per_vector(shape.dtype)});
  problem.x.device().upload(problem.x.host().data());
  problem.dy.device().upload(problem.dy.host().data());
  BatchNormBackwardElemtArgs args;
  args.shape = shape;
  args.grad_output = problem.dy.input();
  args.input = problem.x.input();
  args.weight = problem.weight.input();
  args.bias = problem.bias.input();
  args.relu = problem.relu != Relu::kNone;
  args.saved = device_saved.data();
  args.sums = device_sums.data();
  args.grad_input = dx.data();
  expect_ok(batch_norm_backward_elemt_cuda(args, workspace.get(), stream()), workspace);
  problem.x.expect_accesses(1, 0);
  dx.expect_accesses(0, 1);
  dx.download();
  Buffer rounded(shape.dtype, 1);
  const double count = problem.saved.back();
  for_each_place(shape, [&](std::int64_t o, std::int64_t c, std::int64_t i) {
    rounded.set(0, shape.dtype == DType::kFloat64 ? grad_input_of<double>(problem, sums, o, c, i)
                                                  : grad_input_of<float>(problem, sums, o, c, i));
    ASSERT_TRUE(same_value(dx.get(o, c, i), rounded.get(0)))
        << dx.get(o, c, i) << " instead of " << rounded.get(0) << " at " << o << ", " << c << ", "
        << i;
    const double xhat = (problem.x.get(o, c, i) - problem.mean(c)) * problem.invstd(c);
    const auto at = static_cast<std::size_t>(c);
    double formula = problem.passing(o, c, i);
    if (count > 0.0) {
      formula -= (sums[at] + xhat * sums[static_cast<std::size_t>(shape.channels) + at]) / count;
    }
    formula *= problem.weight.get(c, 1.0) * problem.invstd(c);
    ASSERT_NEAR(dx.get(o, c, i), formula, 16.0 * epsilon_of(shape.dtype) * (2.0 + std::abs(xhat)));
  });
}

std::vector<double> some_sums(std::int64_t channels, std::mt19937& random) {
  std::normal_distribution<double> normal(0.0, 20.0);
  std::vector<double> sums(static_cast<std::size_t>(2 * channels));
  for (double& sum : sums) sum = normal(random);
  return sums;
}

TEST(CudaBatchNormBackward, EveryShapeHasItsSums) {
  std::mt19937 random(1);
  std::uint64_t seed = 0;
  for (const BatchNormShape& shape : every_shape()) {
    SCOPED_TRACE(describe(shape));
    const Relu relu = std::vector{Relu::kNone, Relu::kFromInput, Relu::kFromOutput}[seed % 3];
    const bool writes = seed % 2 == 0;
    const Problem problem(shape, relu, random);
    set_order_for(shape.dtype, seed++);
    expect_reduced(problem, reduce(problem, writes), writes);
  }
}

TEST(CudaBatchNormBackward, EveryShapeHasTheFunctorsGradient) {
  std::mt19937 random(2);
  std::uint64_t seed = 0;
  for (const BatchNormShape& shape : every_shape()) {
    SCOPED_TRACE(describe(shape));
    const Relu relu = seed % 2 == 0 ? Relu::kNone : Relu::kFromInput;
    // Without a count: the gradient of running statistics.
    const Problem problem(shape, relu, random, {}, 0, seed % 5 == 0 ? 0.0 : 100.0);
    set_order_for(shape.dtype, seed++);
    expect_grad_input(problem, some_sums(shape.channels, random));
  }
}

TEST(CudaBatchNormBackward, SmallStridedAndMisalignedTensors) {
  std::mt19937 random(3);
  for (const DType dtype : kEveryDType) {
    const std::int64_t vec = elements_per_vector(dtype);
    for (const BatchNormShape& shape :
         {planes(dtype, 5, 3, 49), planes(dtype, 9, 3, 4 * vec), rows(dtype, 17, 2 * vec + 3)}) {
      for (std::int64_t offset = 0; offset < vec; ++offset) {
        SCOPED_TRACE(describe(shape) << ", offset " << offset);
        const Strides strides{offset % 3, offset, (3 * offset + 1) % vec};
        const Relu relu = offset % 2 == 0 ? Relu::kFromInput : Relu::kFromOutput;
        const Problem problem(shape, relu, random, strides, offset);
        set_order_for(dtype, static_cast<std::uint64_t>(offset));
        expect_reduced(problem, reduce(problem, true), true);
        if (relu == Relu::kFromInput) expect_grad_input(problem, some_sums(shape.channels, random));
      }
    }
  }
}

TEST(CudaBatchNormBackward, SmallSumsHaveTheSameBitsInAnyOrderOfExecution) {
  for (const DType dtype : kEveryDType) {
    for (const BatchNormShape& shape : small_shapes(dtype)) {
      SCOPED_TRACE(describe(shape));
      std::vector<double> expected;
      for (std::int64_t offset = 0; offset < elements_per_vector(dtype); ++offset) {
        std::mt19937 random(4);
        const Problem problem(shape, Relu::kFromInput, random, {0, 0, offset}, offset);
        set_order_for(dtype, static_cast<std::uint64_t>(offset), offset % 2 == 0 ? 1 : 4);
        const std::vector<double> sums = reduce(problem, false).sums;
        if (offset == 0) expected = sums;
        ASSERT_EQ(std::memcmp(sums.data(), expected.data(), sums.size() * sizeof(double)), 0);
      }
    }
  }
}

TEST(CudaBatchNormBackward, SmallEmptyInputHasZeroSums) {
  std::mt19937 random(5);
  for (const DType dtype : kEveryDType) {
    for (const BatchNormShape& shape : {planes(dtype, 0, 5, 49), rows(dtype, 0, 70)}) {
      set_order_for(dtype, 0);
      const Problem problem(shape, Relu::kFromInput, random);
      const Reduced reduced = reduce(problem, true);
      for (const double sum : reduced.sums) ASSERT_EQ(sum, 0.0);
      for (std::int64_t c = 0; c < shape.channels; ++c) {
        ASSERT_EQ(reduced.grad_weight.get(c), 0.0);
        ASSERT_EQ(reduced.grad_bias.get(c), 0.0);
      }
      expect_grad_input(problem, reduced.sums);
    }
  }
}

TEST(CudaBatchNormBackward, SmallGateThatIsNanLetsTheGradientPass) {
  for (const DType dtype : kEveryDType) {
    for (const BatchNormShape& shape : small_shapes(dtype)) {
      for (const Relu relu : {Relu::kFromInput, Relu::kFromOutput}) {
        std::mt19937 random(6);
        Problem problem(shape, relu, random);
        ChannelTensor& gate = relu == Relu::kFromInput ? problem.x : problem.y;
        gate.set(shape.outer - 1, 1, 0, std::nan(""));
        gate.set(0, 1, 0, -std::numeric_limits<double>::infinity());
        set_order_for(dtype, 1);
        const Reduced reduced = reduce(problem, true);
        const auto at = [&](std::int64_t o) {
          return reduced.grad_residual.get((o * shape.channels + 1) * shape.inner);
        };
        EXPECT_EQ(at(shape.outer - 1), problem.dy.get(shape.outer - 1, 1, 0));
        EXPECT_EQ(at(0), 0.0);
      }
    }
  }
}

TEST(CudaBatchNormBackward, RefusesADTypeThatDoesNotExist) {
  BatchNormBackwardReduceArgs reduce_args;
  BatchNormBackwardElemtArgs elemt_args;
  reduce_args.shape = elemt_args.shape = planes(static_cast<DType>(9), 1, 1, 1);
  EXPECT_STREQ(batch_norm_backward_reduce_cuda(reduce_args, {}, stream()).what,
               "dtype of batch_norm_backward_reduce");
  EXPECT_STREQ(batch_norm_backward_elemt_cuda(elemt_args, {}, stream()).what,
               "dtype of batch_norm_backward_elemt");
}

}  // namespace
}  // namespace torchfuse::kernels
