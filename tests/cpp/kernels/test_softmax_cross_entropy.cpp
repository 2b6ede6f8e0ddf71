// SPDX-License-Identifier: BSD-3-Clause
// Cross entropy on the CPU, without torch: values, equal bits at every instruction level and for
// every division of the rows, and no access outside of a tensor.
#include "kernels/softmax_cross_entropy.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "cross_entropy_problem.h"
#include "recorded_results.h"

namespace torchfuse::kernels::testing {
namespace {

CrossEntropyResults run(const CrossEntropyCase& c, const CrossEntropyInputs& in, CpuIsa isa,
                        std::int64_t step) {
  CrossEntropyResults r(c);
  const auto in_steps = [&](const auto& body) {
    for (std::int64_t i = 0; i < c.shape.rows; i += step) body(i, std::min(i + step, c.shape.rows));
  };
  const CrossEntropyArgs args = cross_entropy_args(c, in, r);
  in_steps([&](auto i, auto j) { softmax_cross_entropy_cpu(isa, args, i, j); });
  const CrossEntropyBackwardArgs backward = cross_entropy_backward_args(c, in, r);
  in_steps([&](auto i, auto j) { softmax_cross_entropy_backward_cpu(isa, backward, i, j); });
  return r;
}

TEST(SoftmaxCrossEntropy, ValuesAndBitsAtEveryLevel) {
  for (const CrossEntropyCase& c :
       cross_entropy_cases({{1, 1}, {5, 3}, {4, 32}, {7, 33}, {3, 64}, {2, 1003}})) {
    SCOPED_TRACE(name_of(c));
    const CrossEntropyInputs in(c, /*offset=*/1);
    const CrossEntropyResults expected = run(c, in, levels_here().back(), 1 << 30);
    expect_right(c, in, expected);
    record(expected.losses, expected.log_sum_exp, expected.rest, expected.grad_logits);
    for (const CpuIsa isa : levels_here()) {
      EXPECT_TRUE(run(c, in, isa, 1 << 30) == expected) << name_of(isa);
    }
    EXPECT_TRUE(run(c, in, levels_here().back(), 1) == expected);
  }
}

TEST(SoftmaxCrossEntropy, ErrorsDoNotGrowWithTheLogits) {
  for (const auto& [c, center] : cases_of_large_logits()) {
    SCOPED_TRACE(name_of(c) + " around " + std::to_string(center));
    const CrossEntropyInputs in(c, 0, center);
    for (const CpuIsa isa : levels_here()) expect_right(c, in, run(c, in, isa, 1));
  }
}

TEST(SoftmaxCrossEntropy, ErrorsDoNotGrowWithTheLengthOfARow) {
  const CrossEntropyCase c{{1, (1 << 20) + 13, DType::kFloat32}, 0.1};
  const CrossEntropyInputs in = logits_of_a_long_row(c);
  const CrossEntropyResults expected = run(c, in, levels_here().back(), 1);
  expect_long_row_right(c, in, expected);
  for (const CpuIsa isa : levels_here()) EXPECT_TRUE(run(c, in, isa, 1) == expected);
}

TEST(SoftmaxCrossEntropy, WithoutTheRestTheLogSumIsWhatIsKnown) {
  const CrossEntropyCase c{{1, 4, DType::kFloat32}};
  CrossEntropyInputs in(c);
  in.labels = {0};
  CrossEntropyResults r = run(c, in, levels_here().back(), 1);
  const Buffer with_rest = r.grad_logits;
  r.rest.set(0, 1.0);
  CrossEntropyBackwardArgs args = cross_entropy_backward_args(c, in, r);
  args.rest = nullptr;
  softmax_cross_entropy_backward_cpu(levels_here().back(), args, 0, 1);
  for (std::int64_t j = 0; j < 4; ++j) {
    EXPECT_NEAR(r.grad_logits.get(j), with_rest.get(j), 1e-6);
  }
}

TEST(SoftmaxCrossEntropy, LabelsOutsideOfTheClassesGiveNaN) {
  const CrossEntropyCase c{{3, 40, DType::kFloat32}};
  CrossEntropyInputs in(c);
  in.labels = {40, -1, 7};
  const CrossEntropyResults r = run(c, in, levels_here().back(), 1 << 30);
  for (std::int64_t row = 0; row < 3; ++row) {
    EXPECT_EQ(std::isnan(r.losses.get(row)), row < 2);
    for (std::int64_t j = 0; j < 40; ++j) {
      EXPECT_EQ(std::isnan(r.grad_logits.get(row * 40 + j)), row < 2);
    }
  }
}

TEST(SoftmaxCrossEntropy, HugeLogitsAreNotJoinedByThePadding) {
  const CrossEntropyCase c{{1, 37, DType::kFloat32}};
  CrossEntropyInputs in(c);
  for (std::int64_t j = 0; j < 37; ++j) in.logits.set(j, -std::ldexp(1.0, 40));
  for (const CpuIsa isa : levels_here()) {
    EXPECT_NEAR(run(c, in, isa, 1).losses.get(0), std::log(37.0), 1e-3) << name_of(isa);
  }
}

/// The exponential, in units in the last place of the result.
template <class T>
double exp_error(T x) {
  const auto exact = std::exp(static_cast<long double>(x));
  const T found = exp_of_negative<T>(x);
  const long double ulp = exact * static_cast<long double>(std::numeric_limits<T>::epsilon());
  return static_cast<double>(std::abs(static_cast<long double>(found) - exact) / ulp);
}

TEST(Exponential, IsWithinOneUnitInTheLastPlace) {
  for (int i = 0; i < 200000; ++i) {
    ASSERT_LT(exp_error(-87.0F * static_cast<float>(i) / 200000.0F), 1.0) << i;
    ASSERT_LT(exp_error(-708.0 * i / 200000.0), 1.0) << i;
  }
  EXPECT_EQ(exp_of_negative<float>(0.0F), 1.0F);
  EXPECT_EQ(exp_of_negative<double>(0.0), 1.0);
}

TEST(Exponential, EndsInZeroAndKeepsNaN) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(exp_of_negative<float>(-infinity), 0.0F);
  EXPECT_EQ(exp_of_negative<float>(-1000.0F), 0.0F);
  EXPECT_EQ(exp_of_negative<double>(-static_cast<double>(infinity)), 0.0);
  for (const std::uint32_t bits : {0x7fc00000u, 0xffc00000u, 0x7fc00001u, 0x7fffffffu}) {
    EXPECT_TRUE(std::isnan(exp_of_negative<float>(bits_to_float(bits)))) << bits;
  }
}

}  // namespace
}  // namespace torchfuse::kernels::testing
