// SPDX-License-Identifier: BSD-3-Clause
// The update driver with Lion.
#include "kernels/functors/lion.h"

#include <gtest/gtest.h>

#include "one_state_problem.h"

namespace torchfuse::kernels::testing {
namespace {

OneStateElement formula(const LionParams& group, double /*step*/, OneStateElement in, double grad) {
  const double g = group.maximize ? -grad : grad;
  const double direction = std::lerp(g, in.state, group.beta1.value);
  in.state = std::lerp(g, in.state, group.beta2.value);
  in.param -= group.lr.value * (group.weight_decay.value * in.param + std::copysign(1, direction));
  return in;
}

LionParams lion(int mode) {
  LionParams group;
  group.lr.value = 0.05;
  group.beta1.value = 0.9;
  group.beta2.value = 0.99;
  group.weight_decay.value = (mode & 1) != 0 ? 0.1 : 0.0;
  group.maximize = (mode & 2) != 0;
  return group;
}

TEST(Lion, MatchesTheFp64Formula) { expect_one_state_matches_fp64<Lion>(lion, 4, formula); }

TEST(Lion, EveryLevelAndEverySplitGivesTheSameBits) {
  for (const int mode : {0, 3}) expect_one_state_same_bits<Lion>(lion(mode));
}

TEST(Lion, WithoutADirectionOnlyTheDecayMoves) {
  OneStateProblem problem({}, {1});
  problem.params[0].set(0, 2.0);
  problem.grads[0].set(0, 0.0);
  problem.states[0].set(0, 0.0);
  problem.update<Lion>(lion(1));
  EXPECT_FLOAT_EQ(static_cast<float>(problem.params[0].get(0)), 2.0f - 0.05f * 0.1f * 2.0f);
}

}  // namespace
}  // namespace torchfuse::kernels::testing
