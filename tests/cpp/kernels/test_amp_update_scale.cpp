// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/amp_update_scale.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace torchfuse::kernels {
namespace {

struct Fixture {
  float scale = 1024.0f;
  std::int32_t growth = 0;
  std::int32_t hysteresis = 2;
  float found_inf = 0.0f;
  UpdateScaleArgs args{&scale, &growth, nullptr, &found_inf, {2.0, 0.5, 3, 1}};

  void update(float flag) {
    found_inf = flag;
    amp_update_scale_cpu(args);
  }
};

TEST(UpdateScale, GrowsAfterTheIntervalAndBacksOffAtOnce) {
  Fixture f;
  f.update(0.0f);
  f.update(0.0f);
  EXPECT_EQ(f.scale, 1024.0f);
  EXPECT_EQ(f.growth, 2);
  f.update(0.0f);
  EXPECT_EQ(f.scale, 2048.0f);
  EXPECT_EQ(f.growth, 0);
  f.update(0.0f);
  f.update(2.0f);
  EXPECT_EQ(f.scale, 1024.0f);
  EXPECT_EQ(f.growth, 0);
}

TEST(UpdateScale, ATrackerBeyondTheIntervalWaitsForAnOverflow) {
  Fixture f;
  f.growth = 5;
  f.update(0.0f);
  EXPECT_EQ(f.scale, 1024.0f);
  EXPECT_EQ(f.growth, 6);
  f.update(1.0f);
  EXPECT_EQ(f.scale, 512.0f);
  EXPECT_EQ(f.growth, 0);
}

TEST(UpdateScale, FlushesADenormalScaleAsTheDeviceDoes) {
  Fixture f;
  f.scale = 0x1p-126f;
  f.update(1.0f);
  EXPECT_EQ(f.scale, 0.0f);
}

TEST(UpdateScale, NeverLeavesFp32) {
  Fixture f;
  f.scale = 0x1p127f;
  f.args.params.growth_interval = 1;
  f.update(0.0f);
  EXPECT_EQ(f.scale, 0x1p127f);
}

TEST(UpdateScale, FactorsAreAppliedInFp64) {
  for (const double factor : {1.0, 1.0000001, 1.001, 1.1, 3.0, 0x1p200, 0.9999999, 0.1, 1e-30}) {
    for (const float flag : {0.0f, 1.0f}) {
      Fixture f;
      f.scale = 0x1.234567p10f;
      f.args.params = {factor, factor, 1, 1};
      f.update(flag);
      const auto product = static_cast<float>(static_cast<double>(0x1.234567p10f) * factor);
      const bool stays = std::isinf(product) && flag == 0.0f;
      EXPECT_EQ(f.scale, stays ? 0x1.234567p10f : product) << factor;
    }
  }
}

TEST(UpdateScale, HysteresisToleratesSomeOverflows) {
  Fixture f;
  f.args.hysteresis_tracker = &f.hysteresis;
  f.args.params.hysteresis = 2;
  f.update(1.0f);
  EXPECT_EQ(f.scale, 1024.0f);
  f.update(1.0f);
  EXPECT_EQ(f.scale, 512.0f);
  f.update(1.0f);
  EXPECT_EQ(f.scale, 256.0f) << "used up until the next clean step";
  f.update(0.0f);
  EXPECT_EQ(f.hysteresis, 2);
  f.update(1.0f);
  EXPECT_EQ(f.scale, 256.0f);
}

TEST(UpdateScale, StaysBetweenItsBounds) {
  Fixture f;
  f.args.params.growth_interval = 1;
  f.args.params.min_scale = 300.0f;
  f.args.params.max_scale = 1000.0f;
  f.update(1.0f);
  EXPECT_EQ(f.scale, 512.0f);
  f.update(1.0f);
  EXPECT_EQ(f.scale, 300.0f);
  f.update(0.0f);
  f.update(0.0f);
  EXPECT_EQ(f.scale, 1000.0f);
}

TEST(UpdateScale, CountsAndRecordsAlsoWhenStatic) {
  Fixture f;
  ScaleCounts counts{10, 4, 1};
  std::vector<ScaleRecord> history(3, {-1.0f, -1.0f});
  f.args.counts = &counts;
  f.args.history = history.data();
  f.args.history_size = 3;
  f.update(1.0f);
  EXPECT_EQ(counts.updates, 11);
  EXPECT_EQ(counts.overflows, 5);
  EXPECT_EQ(counts.last_overflowed, 1);
  f.args.params.dynamic = false;
  f.update(0.0f);
  f.update(1.0f);
  EXPECT_EQ(counts.last_overflowed, 1);
  EXPECT_EQ(counts.overflows, 6);
  EXPECT_EQ(f.scale, 512.0f) << "only the first update moved it";
  // Update 10 goes to row 1.
  EXPECT_EQ(history[1].scale, 1024.0f);
  EXPECT_EQ(history[1].overflowed, 1.0f);
  EXPECT_EQ(history[2].scale, 512.0f);
  EXPECT_EQ(history[2].overflowed, 0.0f);
  EXPECT_EQ(history[0].overflowed, 1.0f);
}

}  // namespace
}  // namespace torchfuse::kernels
