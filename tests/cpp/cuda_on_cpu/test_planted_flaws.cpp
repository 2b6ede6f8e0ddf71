// SPDX-License-Identifier: BSD-3-Clause
// Every kind of error that the emulation is there to catch, planted and caught.
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <numeric>

#include "engine.h"
#include "kernels/cuda/device.h"
#include "planted_kernels.h"
#include "recorder.h"

namespace cuda_on_cpu {
namespace {

using planted::Flaw;
using planted::kThreads;
using torchfuse::kernels::testing::DeviceArray;
using torchfuse::kernels::testing::DeviceMemory;

#if defined(__SANITIZE_THREAD__)
constexpr bool kRaceDetector = true;
#else
constexpr bool kRaceDetector = false;
#endif

class PlantedFlaw : public ::testing::Test {
 protected:
  void SetUp() override {
    set_schedule({});
    GTEST_FLAG_SET(death_test_style, "threadsafe");
  }
};

/// Runs `statement` in a process of its own, which must report a data race.
#define EXPECT_RACE(statement) \
  EXPECT_EXIT(                 \
      {                        \
        statement;             \
        std::exit(0);          \
      },                       \
      ::testing::ExitedWithCode(66), "data race")

bool reverses_correctly(std::uint64_t seed, Flaw flaw) {
  constexpr unsigned kBlocks = 3;
  set_schedule({.seed = seed});
  std::vector<float> in(kBlocks * kThreads);
  std::iota(in.begin(), in.end(), 0.0f);
  std::vector<float> out(in.size(), -1.0f);
  EXPECT_EQ(planted::reverse_blocks(in.data(), out.data(), kBlocks, flaw), 0) << last_fault();
  for (unsigned i = 0; i < out.size(); ++i) {
    const unsigned block = i / kThreads * kThreads;
    if (out[i] != in[block + kThreads - 1 - i % kThreads]) return false;
  }
  return true;
}

TEST_F(PlantedFlaw, MissingBarrierSmall) {
  for (const std::uint64_t seed : {0, 1, 2, 3}) EXPECT_TRUE(reverses_correctly(seed, Flaw::kNone));
  if (kRaceDetector) {
    EXPECT_RACE(reverses_correctly(0, Flaw::kPlanted));
  } else {
    for (const std::uint64_t seed : {0, 1, 2, 3}) {
      EXPECT_FALSE(reverses_correctly(seed, Flaw::kPlanted));
    }
  }
}

std::uint32_t sum_by_last_block(Flaw flaw) {
  constexpr unsigned kBlocks = 6;
  std::vector<std::uint32_t> partials(kBlocks, 0);
  std::uint32_t arrivals = 0, sum = 0;
  EXPECT_EQ(planted::last_block_sums(partials.data(), &arrivals, &sum, kBlocks, flaw), 0);
  return sum;
}

TEST_F(PlantedFlaw, MissingHandOverOrderSmall) {
  for (const std::uint64_t seed : {0, 1, 2, 3}) {
    set_schedule({.seed = seed});
    EXPECT_EQ(sum_by_last_block(Flaw::kNone), 21u);
  }
  // Where threads run one at a time the order is there by itself: only the race detector sees that
  // the source does not ask for it.
  if (kRaceDetector) {
    EXPECT_RACE(sum_by_last_block(Flaw::kPlanted));
  }
}

TEST_F(PlantedFlaw, LaneOutOfBounds) {
  for (const unsigned numel : {1u, 255u, 256u, 1000u}) {
    const DeviceArray<float> data(std::vector<float>(numel, 1.0f));
    ASSERT_EQ(planted::scale(data.data(), numel, Flaw::kNone), 0) << last_fault();
    data.expect_margins_intact();
    EXPECT_EQ(data.to_host(), std::vector<float>(numel, 2.0f));
  }
  // At least 4096 bytes past the end: the page behind the tensor.
  const DeviceArray<float> data(std::vector<float>(8, 1.0f));
  EXPECT_DEATH(planted::scale(data.data(), 8 + 1024, Flaw::kPlanted), "");
}

TEST_F(PlantedFlaw, LaneJustOutOfBoundsChangesTheMargin) {
#if defined(__SANITIZE_ADDRESS__)
  const DeviceArray<float> data(std::vector<float>(253, 1.0f));
  EXPECT_DEATH(planted::scale(data.data(), 253, Flaw::kPlanted), "AddressSanitizer");
#else
  // 253 floats leave 12 bytes up to the inaccessible page: room for three lanes.
  const DeviceMemory data(253 * sizeof(float));
  planted::iota(static_cast<float*>(data.data()), 254, Flaw::kNone);
  ::testing::TestPartResultArray failures;
  {
    ::testing::ScopedFakeTestPartResultReporter reporter(
        ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ALL_THREADS, &failures);
    data.expect_margins_intact();
  }
  ASSERT_EQ(failures.size(), 1);
  EXPECT_NE(std::string(failures.GetTestPartResult(0).message()).find("behind a tensor"),
            std::string::npos);
#endif
}

TEST_F(PlantedFlaw, UnwrittenOutput) {
  for (const Flaw flaw : {Flaw::kNone, Flaw::kPlanted}) {
    const DeviceMemory data(1000 * sizeof(float));
    ASSERT_EQ(planted::iota(static_cast<float*>(data.data()), 1000, flaw), 0) << last_fault();
    std::vector<float> out(1000);
    data.download(out.data());
    EXPECT_EQ(out[998], 998.0f);
    EXPECT_EQ(std::isnan(out[999]), flaw == Flaw::kPlanted);
    if (!recorder_available()) continue;
    EXPECT_EQ(counts_of(data.data()).writes[998 * 4], 1);
    EXPECT_EQ(counts_of(data.data()).writes[999 * 4], flaw == Flaw::kNone ? 1 : 0);
    EXPECT_EQ(data.stores(), flaw == Flaw::kNone ? 1000u : 999u);
  }
}

TEST_F(PlantedFlaw, DivergentBarrier) {
  ASSERT_NE(planted::divergent_barrier(), 0);
  EXPECT_NE(last_fault().find("no thread can go on"), std::string::npos) << last_fault();
  EXPECT_NE(last_fault().find("block 0, from thread 0 on: waits in __syncthreads"),
            std::string::npos);
  EXPECT_NE(last_fault().find("block 0, from thread 1 on: has exited"), std::string::npos);
  // The next launch is not affected.
  EXPECT_TRUE(reverses_correctly(1, Flaw::kNone));
}

TEST_F(PlantedFlaw, ShufflesFromLanesThatDoNotOffer) {
  for (const std::uint64_t seed : {0, 1, 2}) {
    set_schedule({.seed = seed});
    ASSERT_NE(planted::shuffle_with_exited_lane(), 0);
    const bool named = last_fault().find("names lane 3, which has exited") != std::string::npos;
    const bool stuck = last_fault().find("thread 3 on: has exited") != std::string::npos;
    EXPECT_TRUE(named || stuck) << last_fault();
  }
  std::vector<float> out(32);
  ASSERT_NE(planted::shuffle_outside_mask(out.data()), 0);
  EXPECT_NE(last_fault().find("reads lane 16, which its mask 0000ffff does not name"),
            std::string::npos)
      << last_fault();
}

TEST_F(PlantedFlaw, MisalignedVectorAndTooMuchSharedMemory) {
  alignas(16) const float data[8] = {};
  float out = 0;
  EXPECT_EQ(planted::load_vector(data, &out), 0);
  ASSERT_NE(planted::load_vector(data + 1, &out), 0);
  EXPECT_NE(last_fault().find("an access of 16 bytes at the misaligned address"),
            std::string::npos);
  ASSERT_NE(planted::too_much_shared(), 0);
  EXPECT_NE(last_fault().find("49153 bytes of static shared memory, the limit is 49152"),
            std::string::npos);
}

}  // namespace
}  // namespace cuda_on_cpu
