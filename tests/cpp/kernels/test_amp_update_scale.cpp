// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/amp_update_scale.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace torchfuse::kernels
