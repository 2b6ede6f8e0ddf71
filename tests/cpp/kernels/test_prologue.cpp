// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/prologue.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace torchfuse::kernels {
namespace {

struct Fixture {
  float scale = 4.0f;
  float found_inf = 0.0f;
  float steps[3] = {0.0f, 5.0f, 7.0f};
  float* step_pointers[2] = {&steps[0], &steps[2]};
  NormPartial partials[2] = {{9.0, 0.0, 0}, {16.0, 0.0, 0}};
  StepScalars scalars{-1.0, -1.0f, -1.0f};
  PrologueArgs args;

  Fixture() {
    args.params.grad_scale = &scale;
    args.params.found_inf = &found_inf;
    args.partials = partials;
    args.num_partials = 2;
    args.scalars = &scalars;
    args.steps = step_pointers;
    args.num_steps = 2;
  }
};

TEST(Prologue, UnscalesAndCountsTheListedSteps) {
  Fixture f;
  prologue_cpu(f.args);
  EXPECT_EQ(f.scalars.grad_coef, 0.25);
  EXPECT_EQ(f.scalars.skip, 0.0f);
  EXPECT_TRUE(std::isnan(f.scalars.total_norm)) << "a norm nobody asked for";
  EXPECT_EQ(f.steps[0], 1.0f);
  EXPECT_EQ(f.steps[1], 5.0f);
  EXPECT_EQ(f.steps[2], 8.0f);
}

TEST(Prologue, ClipsByTheUnscaledNorm) {
  Fixture f;
  f.args.params.has_norm = true;
  f.args.params.max_grad_norm = 0.5;
  prologue_cpu(f.args);
  EXPECT_FLOAT_EQ(f.scalars.total_norm, 1.25f);
  EXPECT_DOUBLE_EQ(f.scalars.grad_coef, 0.25 * (0.5 / (1.25 + 1e-6)));
  f.args.params.max_grad_norm = 2.0;
  prologue_cpu(f.args);
  EXPECT_EQ(f.scalars.grad_coef, 0.25);
}

TEST(Prologue, SkipsAboveAThresholdWithoutAnOverflow) {
  const float of_device = 1.0f;
  for (const bool on_device : {false, true}) {
    Fixture f;
    f.args.params.has_norm = f.args.params.check = true;
    ScalarParam& threshold = f.args.params.skip_norm_above;
    threshold.value = 1.25;  // the norm is not above it
    prologue_cpu(f.args);
    EXPECT_EQ(f.scalars.skip, 0.0f);
    threshold.value = 1.0;
    if (on_device) threshold = {1e9, &of_device};
    prologue_cpu(f.args);
    EXPECT_EQ(f.scalars.skip, 1.0f);
    EXPECT_EQ(f.found_inf, 0.0f);
    EXPECT_EQ(f.steps[0], 1.0f) << "one step of two";
    f.partials[0].small = std::numeric_limits<double>::quiet_NaN();
    prologue_cpu(f.args);
    EXPECT_EQ(f.scalars.skip, 0.0f) << "NaN is not above";
  }
}

TEST(Prologue, AnyNonZeroFlagSkipsAndCountsNothing) {
  for (const float flag : {1.0f, 2.0f, -1.0f}) {
    Fixture f;
    f.found_inf = flag;
    prologue_cpu(f.args);
    EXPECT_EQ(f.scalars.skip, 1.0f);
    EXPECT_EQ(f.found_inf, flag);
    EXPECT_EQ(f.steps[0], 0.0f);
  }
}

TEST(Prologue, ChecksOnlyWhenAsked) {
  Fixture f;
  f.args.params.has_norm = true;
  f.partials[1].nonfinite = 1;
  prologue_cpu(f.args);
  EXPECT_EQ(f.scalars.skip, 0.0f);
  EXPECT_EQ(f.found_inf, 0.0f);
  f.args.params.check = true;
  prologue_cpu(f.args);
  EXPECT_EQ(f.scalars.skip, 1.0f);
  EXPECT_EQ(f.found_inf, 1.0f);
  EXPECT_EQ(f.steps[0], 1.0f);
}

TEST(Prologue, ANanNormReachesTheGradientsWithoutAScaler) {
  Fixture f;
  f.args.params.found_inf = nullptr;
  f.args.params.has_norm = true;
  f.args.params.max_grad_norm = 1.0;
  f.partials[0].small = NAN;
  prologue_cpu(f.args);
  EXPECT_TRUE(std::isnan(f.scalars.grad_coef));
  EXPECT_EQ(f.scalars.skip, 0.0f);
}

TEST(Prologue, InvertsEveryScaleAsTorchDoes) {
  Fixture f;
  float grad_scale = 0.0f;
  f.args.params.grad_scale = &grad_scale;
  for (const float scale : {0x1p126f, 0x1p127f, 0x1.8p127f, 3e38f,
                            std::numeric_limits<float>::max(), 0x1p-127f, 1e-38f, 65536.0f, 3.0f}) {
    grad_scale = scale;
    prologue_cpu(f.args);
    // Here denormals count: they are what fp32 makes of the reciprocal.
    const float inverse = static_cast<float>(1.0 / static_cast<double>(scale));
    EXPECT_EQ(f.scalars.grad_coef, static_cast<double>(inverse)) << scale;
  }
}

TEST(Prologue, HugeNormsClipToTheRightCoefficient) {
  Fixture f;
  f.args.params.has_norm = true;
  f.args.params.max_grad_norm = 1.0;
  f.partials[0] = {0.0, 1.0, 0};  // one element of 2^600
  f.partials[1] = {};
  prologue_cpu(f.args);
  EXPECT_NEAR(f.scalars.grad_coef / (0.25 * std::ldexp(1.0, -600) * 4.0), 1.0, 1e-12);
  EXPECT_TRUE(std::isinf(f.scalars.total_norm));
}

}  // namespace
}  // namespace torchfuse::kernels
