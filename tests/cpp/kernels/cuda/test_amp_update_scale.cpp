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

/// The scale, its trackers and what is recorded of it, on the device and, beside them, on the CPU.
class Scale {
 public:
  Scale(const ScaleState& start, const ScaleUpdateParams& params, bool with_hysteresis,
        bool recorded = false)
      : host_(start), device_({start}), device_counts_({counts_}), device_history_(history_) {
    on_host_ = {&host_.scale, &host_.growth_tracker, nullptr, nullptr, params};
    ScaleState& state = *device_.data();
    on_device_ = {&state.scale, &state.growth_tracker, nullptr, nullptr, params};
    if (with_hysteresis) {
      on_host_.hysteresis_tracker = &host_.hysteresis_tracker;
      on_device_.hysteresis_tracker = &state.hysteresis_tracker;
    }
    if (!recorded) return;
    on_host_.counts = &counts_;
    on_device_.counts = device_counts_.data();
    on_host_.history = history_.data();
    on_device_.history = device_history_.data();
    on_host_.history_size = on_device_.history_size = std::ssize(history_);
  }

  void update_and_compare(float flag) {
    const DeviceArray<float> found_inf({flag});
    on_host_.found_inf = &flag;
    on_device_.found_inf = found_inf.data();
    ASSERT_NO_FATAL_FAILURE(expect_ok(amp_update_scale_cuda(on_device_, stream())));
    amp_update_scale_cpu(on_host_);
    const ScaleState state = device_.to_host()[0];
    EXPECT_TRUE(same_value(state.scale, host_.scale)) << state.scale << " and " << host_.scale;
    EXPECT_EQ(state.growth_tracker, host_.growth_tracker);
    EXPECT_EQ(state.hysteresis_tracker, host_.hysteresis_tracker);
    EXPECT_TRUE(same_value(found_inf.to_host()[0], flag));
    const ScaleCounts counted = device_counts_.to_host()[0];
    EXPECT_EQ(counted.updates, counts_.updates);
    EXPECT_EQ(counted.overflows, counts_.overflows);
    EXPECT_EQ(counted.last_overflowed, counts_.last_overflowed);
    const std::vector<ScaleRecord> rows = device_history_.to_host();
    for (std::size_t row = 0; row < rows.size(); ++row) {
      EXPECT_EQ(rows[row].scale, history_[row].scale);
      EXPECT_EQ(rows[row].overflowed, history_[row].overflowed);
    }
    for (const DeviceMemory* memory : std::initializer_list<const DeviceMemory*>{
             &device_, &found_inf, &device_counts_, &device_history_}) {
      memory->expect_margins_intact();
    }
  }

  const ScaleCounts& counts() const { return counts_; }

 private:
  ScaleState host_;
  ScaleCounts counts_{};
  std::vector<ScaleRecord> history_ = std::vector<ScaleRecord>(3, {0.0f, 0.0f});
  UpdateScaleArgs on_host_, on_device_;
  DeviceArray<ScaleState> device_;
  DeviceArray<ScaleCounts> device_counts_;
  DeviceArray<ScaleRecord> device_history_;
};

TEST(CudaUpdateScale, SmallSequencesHaveTheCpusBits) {
  std::mt19937 random(1);
  set_order({});
  for (const bool with_hysteresis : {false, true}) {
    for (const std::int64_t interval : {1, 3, 2000}) {
      for (const bool dynamic : {false, true}) {
        const ScaleUpdateParams params{2.0, 0.5, interval, 2, 100.0f, 5000.0f, dynamic};
        Scale scale({1024.0f, 0, 2}, params, with_hysteresis, true);
        for (int step = 0; step < 40; ++step) {
          scale.update_and_compare(step < 10 || random() % 4 == 0 ? 0.0f : 1.0f);
        }
        EXPECT_EQ(scale.counts().updates, 40);
        EXPECT_GT(scale.counts().overflows, 0);
        ASSERT_FALSE(HasFailure()) << "interval " << interval << ", hysteresis " << with_hysteresis;
      }
    }
  }
}

TEST(CudaUpdateScale, EveryStateHasTheCpusBits) {
  set_order({});
  for (const float start : {1.0f, 0x1p127f, 0x1.fffffep127f, 0x1p-126f, 0x1p-140f, 0.0f, -4.0f,
                            kInfinity, std::nanf("")}) {
    for (const std::int32_t tracker : {0, 1999, 2000, -5, kLargest}) {
      for (const std::int32_t left : {-1, 0, 1, 2}) {
        for (const float flag : {0.0f, -0.0f, 1.0f, 0x1p-140f, kInfinity, std::nanf("")}) {
          Scale scale({start, tracker, left}, {2.0, 0.5, 2000, 2}, true);
          scale.update_and_compare(flag);
          ASSERT_FALSE(HasFailure()) << "scale " << start << ", growth tracker " << tracker
                                     << ", hysteresis tracker " << left << ", flag " << flag;
        }
      }
    }
  }
}

}  // namespace
}  // namespace torchfuse::kernels
