// SPDX-License-Identifier: BSD-3-Clause
// The update driver with SGD, and without the state where there is no momentum.
#include "kernels/functors/sgd.h"

#include <gtest/gtest.h>

#include <limits>

#include "one_state_problem.h"

namespace torchfuse::kernels::testing {
namespace {

OneStateElement formula(const SgdParams& group, double step, OneStateElement in, double grad) {
  const double decay = group.weight_decay.value * in.param;
  const double momentum = group.momentum.value;
  double direction = (group.maximize ? -grad : grad) + (group.wd_after_momentum ? 0.0 : decay);
  if (momentum != 0.0) {
    in.state =
        step == 1.0 ? direction : momentum * in.state + (1.0 - group.dampening.value) * direction;
    direction = group.nesterov ? direction + momentum * in.state : in.state;
  }
  if (group.wd_after_momentum) direction += decay;
  in.param -= group.lr.value * direction;
  return in;
}

SgdParams sgd(int mode) {
  SgdParams group;
  group.lr.value = 0.05;
  group.momentum.value = (mode & 1) != 0 ? 0.9 : 0.0;
  group.dampening.value = 0.25;
  group.weight_decay.value = 0.1;
  group.nesterov = (mode & 2) != 0;
  group.wd_after_momentum = (mode & 4) != 0;
  group.maximize = (mode & 8) != 0;
  return group;
}

TEST(Sgd, MatchesTheFp64Formula) { expect_one_state_matches_fp64<Sgd>(sgd, 16, formula); }

TEST(Sgd, EveryLevelAndEverySplitGivesTheSameBits) {
  for (const int mode : {0, 1, 3, 5}) expect_one_state_same_bits<Sgd>(sgd(mode));
}

// As behind a loss scale of 2^127, or of 2^117 with clipping: in vectors, pairs and tails.
TEST(Sgd, ADenormalCoefficientGivesItsGradients) {
  SgdParams group;
  group.lr.value = 1.0;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const CpuIsa isa : levels_here()) {
      OneStateProblem problem({dtype, dtype, dtype}, {203});
      problem.scalars.grad_coef = 0x1.8p-128;
      for (std::int64_t i = 0; i < 203; ++i) {
        problem.params[0].set(i, 0.0);
        problem.grads[0].set(i, std::ldexp(1.0 + static_cast<double>(i % 32) / 32.0, 127));
      }
      fused_update_cpu(isa, problem.args<Sgd>(group), 0, 203);
      for (std::int64_t i = 0; i < 203; ++i) {
        const double exact = -0.75 * (1.0 + static_cast<double>(i % 32) / 32.0);
        ASSERT_NEAR(problem.params[0].get(i), exact, dtype == DType::kFloat32 ? 0.0 : 4e-3) << i;
      }
    }
  }
}

TEST(Sgd, CountsFromWhereTheBufferBegins) {
  for (const float updates : {1.0f, 2.0f}) {
    OneStateProblem late({}, interesting_sizes(), 50.0f + updates);
    OneStateProblem early({}, interesting_sizes(), updates);
    const float start = 50.0f;
    for (TensorRow& row : late.rows.rows) row.start = &start;
    late.update<Sgd>(sgd(1));
    early.update<Sgd>(sgd(1));
    EXPECT_TRUE(late == early) << updates;
  }
}

TEST(Sgd, WithoutMomentumTheBufferMayBeAbsentAndIsLeftAlone) {
  OneStateProblem absent({}, interesting_sizes());
  for (TensorRow& row : absent.rows.rows) row.state[0] = nullptr;
  absent.update<Sgd>(sgd(0));
  const OneStateProblem before({}, interesting_sizes());
  OneStateProblem present({}, interesting_sizes());
  present.update<Sgd>(sgd(0));
  EXPECT_TRUE(present.params == absent.params);
  EXPECT_TRUE(present.states == before.states);
}

TEST(Sgd, AMomentumOnTheDeviceCountsAsUsedEvenWhileItIsZero) {
  float momentum = 0.0f;
  SgdParams by_pointer = sgd(0);
  by_pointer.momentum.value = -1.0;
  by_pointer.momentum.pointer = &momentum;
  EXPECT_TRUE(Sgd::uses_state(by_pointer, 0));
  EXPECT_FALSE(Sgd::uses_state(sgd(0), 0));
  OneStateProblem a({}, {100});
  OneStateProblem b({}, {100});
  a.update<Sgd>(by_pointer);
  b.update<Sgd>(sgd(0));
  EXPECT_TRUE(a == b) << "a momentum of 0 leaves the buffer as it is";
  momentum = 0.5f;
  SgdParams by_value = sgd(0);
  by_value.momentum.value = 0.5;
  a.update<Sgd>(by_pointer);
  b.update<Sgd>(by_value);
  EXPECT_TRUE(a == b);
}

TEST(Sgd, InfinitiesPropagateAsNumbersDo) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const float step : {1.0f, 2.0f}) {
    OneStateProblem problem({}, {20}, step);
    problem.grads[0].set(17, inf);
    SgdParams group = sgd(1);
    problem.update<Sgd>(group);
    EXPECT_EQ(problem.states[0].get(17), inf);
    EXPECT_EQ(problem.params[0].get(17), -inf);
  }
}

}  // namespace
}  // namespace torchfuse::kernels::testing
