// SPDX-License-Identifier: BSD-3-Clause
// The loss scale's update gives the bits of the CPU, whose rules have tests of their own.
#include "kernels/amp_update_scale.h"

#include <gtest/gtest.h>

#include <limits>

#include "device.h"
#include "gradient_list.h"

namespace torchfuse::kernels {
namespace {

using namespace testing;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::int32_t kLargest = std::numeric_limits<std::int32_t>::max();

/// The scale and its trackers on the device and, beside them, on the CPU.
class Scale {
 public:
  Scale(ScaleState start, const ScaleUpdateParams& params, bool with_hysteresis)
      : params_(params),
        with_hysteresis_(with_hysteresis),
        host_(start),
        scale_({start.scale}),
        growth_({start.growth_tracker}),
        hysteresis_({start.hysteresis_tracker}) {}

  void update_and_compare(float flag) {
    const DeviceArray<float> found_inf({flag});
    const Status status = amp_update_scale_cuda(
        {scale_.data(), growth_.data(), with_hysteresis_ ? hysteresis_.data() : nullptr,
         found_inf.data(), params_},
        stream());
    ASSERT_TRUE(status.ok()) << status.what;
    synchronize();
    amp_update_scale_cpu({&host_.scale, &host_.growth_tracker,
                          with_hysteresis_ ? &host_.hysteresis_tracker : nullptr, &flag, params_});
    EXPECT_TRUE(same_value(scale(), host_.scale)) << scale() << " and " << host_.scale;
    EXPECT_EQ(growth_.to_host()[0], host_.growth_tracker);
    EXPECT_EQ(hysteresis_.to_host()[0], host_.hysteresis_tracker);
    EXPECT_TRUE(same_value(found_inf.to_host()[0], flag));
    for (const DeviceMemory* memory :
         std::initializer_list<const DeviceMemory*>{&scale_, &growth_, &hysteresis_, &found_inf}) {
      memory->expect_margins_intact();
    }
  }

  float scale() const { return scale_.to_host()[0]; }
  const ScaleState& host() const { return host_; }

 private:
  ScaleUpdateParams params_;
  bool with_hysteresis_;
  ScaleState host_;
  DeviceArray<float> scale_;
  DeviceArray<std::int32_t> growth_;
  DeviceArray<std::int32_t> hysteresis_;
};

TEST(CudaUpdateScale, SmallSequencesHaveTheCpusBits) {
  std::mt19937 random(1);
  set_order({});
  for (const bool with_hysteresis : {false, true}) {
    for (const std::int64_t interval : {1, 3, 2000}) {
      for (const std::int32_t hysteresis : {1, 2, 3}) {
        Scale scale({65536.0f, 0, hysteresis}, {2.0, 0.5, interval, hysteresis}, with_hysteresis);
        for (int step = 0; step < 40; ++step) scale.update_and_compare(random() % 4 == 0 ? 1 : 0);
        ASSERT_FALSE(HasFailure()) << "interval " << interval << ", hysteresis " << hysteresis;
      }
    }
  }
}

TEST(CudaUpdateScale, EveryStateHasTheCpusBits) {
  set_order({});
  for (const float start : {1.0f, 0x1p127f, 0x1.fffffep127f, 0x1p-126f, 0x1p-140f, 0.0f, -4.0f,
                            kInfinity, std::nanf("")}) {
    for (const std::int32_t tracker : {0, 1, 1999, 2000, -5, kLargest}) {
      for (const std::int32_t left : {-1, 0, 1, 2}) {
        for (const float flag : {0.0f, -0.0f, 1.0f, 2.0f, 0x1p-140f, kInfinity, std::nanf("")}) {
          Scale scale({start, tracker, left}, {2.0, 0.5, 2000, 2}, true);
          scale.update_and_compare(flag);
          ASSERT_FALSE(HasFailure()) << "scale " << start << ", growth tracker " << tracker
                                     << ", hysteresis tracker " << left << ", flag " << flag;
        }
      }
    }
  }
}

TEST(CudaUpdateScale, BoundsCountsAndHistoryHaveTheCpusBits) {
  set_order({});
  std::mt19937 random(2);
  for (const bool dynamic : {true, false}) {
    UpdateScaleArgs host;
    host.params = {2.0, 0.5, 2, 1, 100.0f, 5000.0f, dynamic};
    host.history_size = 3;
    UpdateScaleArgs device = host;
    float scale = 1024.0f;
    std::int32_t growth = 0;
    float flag = 0.0f;
    ScaleCounts counts;
    std::vector<ScaleRecord> history(3, {0.0f, 0.0f});
    const DeviceArray<float> device_scale({scale});
    const DeviceArray<std::int32_t> device_growth({growth});
    const DeviceArray<ScaleCounts> device_counts({counts});
    const DeviceArray<ScaleRecord> device_history(history);
    host.scale = &scale;
    host.growth_tracker = &growth;
    host.found_inf = &flag;
    host.counts = &counts;
    host.history = history.data();
    device.scale = device_scale.data();
    device.growth_tracker = device_growth.data();
    device.counts = device_counts.data();
    device.history = device_history.data();
    for (int step = 0; step < 40; ++step) {
      flag = step < 20 || random() % 4 == 0 ? 0.0f : 1.0f;
      const DeviceArray<float> found_inf({flag});
      device.found_inf = found_inf.data();
      const Status status = amp_update_scale_cuda(device, stream());
      ASSERT_TRUE(status.ok()) << status.what;
      synchronize();
      amp_update_scale_cpu(host);
      EXPECT_EQ(device_scale.to_host()[0], scale);
      const ScaleCounts counted = device_counts.to_host()[0];
      EXPECT_EQ(counted.updates, counts.updates);
      EXPECT_EQ(counted.overflows, counts.overflows);
      EXPECT_EQ(counted.last_overflowed, counts.last_overflowed);
      const auto rows = device_history.to_host();
      for (int row = 0; row < 3; ++row) {
        EXPECT_EQ(rows[row].scale, history[row].scale);
        EXPECT_EQ(rows[row].overflowed, history[row].overflowed);
      }
    }
    EXPECT_EQ(counts.updates, 40);
    EXPECT_GT(counts.overflows, 0);
    for (const DeviceMemory* memory : std::initializer_list<const DeviceMemory*>{
             &device_scale, &device_growth, &device_counts, &device_history}) {
      memory->expect_margins_intact();
    }
  }
}

TEST(CudaUpdateScale, FactorsAreAppliedInFp64) {
  set_order({});
  for (const double factor : {1.0, 1.0000001, 1.001, 1.1, 3.0, 0x1p200, 0.9999999, 0.1, 1e-30}) {
    for (const float flag : {0.0f, 1.0f}) {
      Scale scale({0x1.234567p10f, 0, 0}, {factor, factor, 1, 1}, false);
      scale.update_and_compare(flag);
      const auto product = static_cast<float>(static_cast<double>(0x1.234567p10f) * factor);
      EXPECT_EQ(scale.scale(), std::isinf(product) && flag == 0.0f ? 0x1.234567p10f : product);
    }
  }
}

// What no comparison with the CPU would notice: a rule that both got wrong.
TEST(CudaUpdateScale, SmallSequenceFollowsTheRules) {
  set_order({});
  Scale scale({1024.0f, 0, 2}, {2.0, 0.5, 2, 2}, true);
  const auto expect = [&](float flag, float expected, std::int32_t growth, std::int32_t left) {
    scale.update_and_compare(flag);
    EXPECT_EQ(scale.scale(), expected);
    EXPECT_EQ(scale.host().growth_tracker, growth);
    EXPECT_EQ(scale.host().hysteresis_tracker, left);
  };
  expect(0.0f, 1024.0f, 1, 2);
  expect(0.0f, 2048.0f, 0, 2);
  expect(1.0f, 2048.0f, 0, 1);  // the first overflow uses up the hysteresis
  expect(1.0f, 1024.0f, 0, 0);
  expect(1.0f, 512.0f, 0, -1);
  expect(0.0f, 512.0f, 1, 2);
  expect(std::nanf(""), 512.0f, 0, 1);
}

}  // namespace
}  // namespace torchfuse::kernels
