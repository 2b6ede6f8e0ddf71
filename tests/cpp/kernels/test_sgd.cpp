// SPDX-License-Identifier: BSD-3-Clause
// What SGD alone has: a buffer that may begin late or be absent, and a momentum on the device.
#include <gtest/gtest.h>

#include <limits>

#include "optimizer_cases.h"
#include "optimizer_problem.h"

namespace torchfuse::kernels::testing {
namespace {

constexpr StepScalars kHalf{0.5, 0.0f, 0.0f};

SgdParams sgd(int mode) { return OptimizerCase<Sgd>::group(mode); }

/// A step in fp32. `begun`: updates before the buffers began.
void step_sgd(TensorList& list, const SgdParams& group, float step, float begun = 0.0f) {
  OptimizerProblem<Sgd> problem({}, list, {group}, &step);
  for (TensorRow& row : problem.rows.rows) row.start = &begun;
  problem.run_on_cpu(kHalf);
}

// As behind a loss scale of 2^127, or of 2^117 with clipping: in vectors, pairs and tails.
TEST(Sgd, ADenormalCoefficientGivesItsGradients) {
  SgdParams group;
  group.lr.value = 1.0;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const CpuIsa isa : levels_here()) {
      const UpdateTuple tuple{dtype, dtype, dtype};
      TensorList list = contents_of<Sgd>(tuple, {203});
      for (std::int64_t i = 0; i < 203; ++i) {
        list[0].parts[kParam].set(i, 0.0);
        list[0].parts[kGrad].set(i, std::ldexp(1.0 + static_cast<double>(i % 32) / 32.0, 127));
      }
      float step = 3.0f;
      OptimizerProblem<Sgd>(tuple, list, {group}, &step).run_on_cpu({0x1.8p-128, 0.0f, 0.0f}, isa);
      for (std::int64_t i = 0; i < 203; ++i) {
        const double exact = -0.75 * (1.0 + static_cast<double>(i % 32) / 32.0);
        const double tolerance = dtype == DType::kFloat32 ? 0.0 : 4e-3;
        ASSERT_NEAR(list[0].parts[kParam].get(i), exact, tolerance) << i;
      }
    }
  }
}

TEST(Sgd, CountsFromWhereTheBufferBegins) {
  for (const float updates : {1.0f, 2.0f}) {
    TensorList late = contents_of<Sgd>({}, interesting_sizes());
    TensorList early = late;
    step_sgd(late, sgd(1), 50.0f + updates, 50.0f);
    step_sgd(early, sgd(1), updates);
    expect_same_bits(late, early);
  }
}

TEST(Sgd, WithoutMomentumTheBufferMayBeAbsentAndIsLeftAlone) {
  const TensorList before = contents_of<Sgd>({}, interesting_sizes());
  TensorList absent = before;
  TensorList present = before;
  step_sgd(absent, sgd(0), 3.0f);
  float step = 3.0f;
  OptimizerProblem<Sgd> problem({}, present, {sgd(0)}, &step);
  for (std::size_t t = 0; t < present.size(); ++t) {
    EXPECT_EQ(problem.rows.rows[t].state[0], nullptr);
    problem.rows.rows[t].state[0] = present[t].parts[kFirst].data();
  }
  problem.run_on_cpu(kHalf);
  expect_same_bits(present, absent);
  for (std::size_t t = 0; t < before.size(); ++t) {
    EXPECT_TRUE(present[t].parts[kFirst] == before[t].parts[kFirst]);
  }
}

TEST(Sgd, AMomentumOnTheDeviceCountsAsUsedEvenWhileItIsZero) {
  float momentum = 0.0f;
  SgdParams by_pointer = sgd(0);
  by_pointer.momentum.value = -1.0;
  by_pointer.momentum.pointer = &momentum;
  EXPECT_TRUE(Sgd::uses_state(by_pointer, 0));
  EXPECT_FALSE(Sgd::uses_state(sgd(0), 0));
  TensorList a = contents_of<Sgd>({}, {100});
  TensorList b = a;
  step_sgd(a, by_pointer, 3.0f);
  step_sgd(b, sgd(0), 3.0f);
  expect_same_bits(a, b);  // the buffer, too
  momentum = 0.5f;
  SgdParams by_value = sgd(0);
  by_value.momentum.value = 0.5;
  step_sgd(a, by_pointer, 3.0f);
  step_sgd(b, by_value, 3.0f);
  expect_same_bits(a, b);
}

TEST(Sgd, InfinitiesPropagateAsNumbersDo) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const float step : {1.0f, 2.0f}) {
    TensorList list = contents_of<Sgd>({}, {20});
    list[0].parts[kGrad].set(17, inf);
    step_sgd(list, sgd(1), step);
    EXPECT_EQ(list[0].parts[kFirst].get(17), inf);
    EXPECT_EQ(list[0].parts[kParam].get(17), -inf);
  }
}

}  // namespace
}  // namespace torchfuse::kernels::testing
