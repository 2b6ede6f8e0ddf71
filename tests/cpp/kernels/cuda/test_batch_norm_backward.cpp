// SPDX-License-Identifier: BSD-3-Clause
// The backward pass of batch normalization: gradient sums against fp64, the input's gradient as its
// functor gives it, every element read once and written once.
#include <gtest/gtest.h>

#include "batch_norm_backward_problem.h"

namespace torchfuse::kernels {
namespace {

using namespace testing;

void expect_reduced(const BackwardProblem& problem, const Reduced& got, bool writes) {
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
double grad_input_of(const BackwardProblem& problem, const std::vector<double>& sums,
                     std::int64_t o, std::int64_t c, std::int64_t i) {
  const std::int64_t channels = problem.shape.channels;
  const auto terms = grad_input_terms<T>(
      problem.mean(c), problem.invstd(c), problem.weight.get(c, 1.0),
      {sums[static_cast<std::size_t>(c)], sums[static_cast<std::size_t>(channels + c)]},
      problem.saved.back());
  const T deviation = static_cast<T>(problem.x.get(o, c, i)) - static_cast<T>(problem.mean(c));
  return static_cast<double>(grad_input(static_cast<T>(problem.passing(o, c, i)), deviation,
                                        terms.dy_scale, terms.deviation_scale, terms.constant));
}

void expect_grad_input(const BackwardProblem& problem, const std::vector<double>& sums) {
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
  expect_ok(batch_norm_backward_elemt_cuda(args, workspace.multiprocessors_alone(), stream()),
            workspace);
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
    const BackwardProblem problem(shape, relu, random);
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
    const BackwardProblem problem(shape, relu, random, {}, 0, seed % 5 == 0 ? 0.0 : 100.0);
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
        const BackwardProblem problem(shape, relu, random, strides, offset);
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
        const BackwardProblem problem(shape, Relu::kFromInput, random, {0, 0, offset}, offset);
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
      const BackwardProblem problem(shape, Relu::kFromInput, random);
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
        BackwardProblem problem(shape, relu, random);
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
