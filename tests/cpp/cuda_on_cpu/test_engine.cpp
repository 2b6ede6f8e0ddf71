// SPDX-License-Identifier: BSD-3-Clause
// What the emulation computes and in which order it runs threads.
#include "engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "planted_kernels.h"

namespace cuda_on_cpu {
namespace {

using planted::Flaw;
using planted::kThreads;
using planted::Row;

class Engine : public ::testing::Test {
 protected:
  void SetUp() override { set_schedule({}); }
};

TEST_F(Engine, CollectivesSmall) {
  for (const std::uint64_t seed : {0, 1, 2}) {
    set_schedule({.seed = seed});
    std::vector<std::uint32_t> out(static_cast<std::size_t>(Row::kRows) * kThreads, 77);
    ASSERT_EQ(planted::collectives(out.data()), 0) << last_fault();
    for (unsigned i = 0; i < kThreads; ++i) {
      const unsigned warp = i / 32 * 32, lane = i % 32;
      const auto at = [&](Row row) { return out[static_cast<unsigned>(row) * kThreads + i]; };
      unsigned ballot = 0;
      for (unsigned l = 0; l < 32; ++l) ballot |= ((warp + l) % 3 == 0 ? 1u : 0u) << l;
      EXPECT_EQ(at(Row::kShfl), warp + 5);
      EXPECT_EQ(at(Row::kDown), lane < 29 ? i + 3 : i);
      EXPECT_EQ(at(Row::kUp), lane < 2 ? i : i - 2);
      EXPECT_EQ(at(Row::kXor), i ^ 1u);
      EXPECT_EQ(at(Row::kBallot), ballot);
      EXPECT_EQ(at(Row::kAny), warp == 32 ? 1u : 0u);
      EXPECT_EQ(at(Row::kAll), warp == 32 ? 0u : 1u);
      EXPECT_EQ(at(Row::kCount), kThreads / 4);
      EXPECT_EQ(at(Row::kSegment), lane % 8 < 7 ? i + 1 : i);
    }
  }
}

TEST_F(Engine, DynamicSharedMemorySmall) {
  for (const std::size_t bytes : {std::size_t{4}, std::size_t{4000}, std::size_t{227 * 1024}}) {
    std::vector<std::uint32_t> out(bytes / 4, 77);
    ASSERT_EQ(planted::dynamic_shared(out.data(), bytes), 0) << last_fault();
    for (std::size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], out.size() - 1 - i);
  }
}

TEST_F(Engine, BarriersSmall) {
  std::vector<std::uint32_t> out(kThreads);
  for (const std::uint64_t seed : {0, 1, 2}) {
    set_schedule({.seed = seed});
    ASSERT_EQ(planted::many_barriers(out.data(), 20), 0) << last_fault();
    for (unsigned i = 0; i < kThreads; ++i) EXPECT_EQ(out[i], (i + 10) % kThreads + 10);
  }
}

TEST_F(Engine, SharedMemoryStartsAsGarbage) {
  std::vector<std::uint32_t> out(kThreads);
  ASSERT_EQ(planted::read_unwritten_shared(out.data()), 0) << last_fault();
  for (const std::uint32_t value : out) EXPECT_EQ(value, 0xffffffffu);
}

std::vector<std::uint32_t> trace_of(const Schedule& schedule, unsigned blocks) {
  set_schedule(schedule);
  std::vector<std::uint32_t> sequence(blocks * 64, 99);
  std::uint32_t length = 0;
  EXPECT_EQ(planted::trace(sequence.data(), &length, blocks), 0) << last_fault();
  EXPECT_EQ(length, sequence.size());
  return sequence;
}

/// How often the running block changes.
std::size_t changes(const std::vector<std::uint32_t>& sequence) {
  std::size_t count = 0;
  for (std::size_t i = 1; i < sequence.size(); ++i) count += sequence[i] != sequence[i - 1];
  return count;
}

TEST_F(Engine, ScheduleIsSeeded) {
  const auto first = trace_of({.seed = 5}, 6);
  EXPECT_EQ(first, trace_of({.seed = 5}, 6));
  EXPECT_NE(first, trace_of({.seed = 6}, 6));
  auto sorted = first;
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t i = 0; i < sorted.size(); ++i) EXPECT_EQ(sorted[i], i / 64);
}

TEST_F(Engine, ResidentBlocksAreInterleaved) {
  EXPECT_EQ(changes(trace_of({.seed = 3, .resident_blocks = 1}, 4)), 3u);
  EXPECT_GT(changes(trace_of({.seed = 3, .resident_blocks = 2}, 4)), 30u);
  const auto four = trace_of({.seed = 3, .resident_blocks = 4}, 4);
  EXPECT_EQ(std::set<std::uint32_t>(four.begin(), four.begin() + 64).size(), 4u);
}

TEST_F(Engine, BlockOrderIsShuffledBySeed) {
  std::set<std::uint32_t> first_blocks;
  for (std::uint64_t seed = 1; seed < 20; ++seed) {
    first_blocks.insert(trace_of({.seed = seed, .resident_blocks = 1}, 4).front());
  }
  EXPECT_EQ(first_blocks.size(), 4u);
  EXPECT_EQ(trace_of({.resident_blocks = 1}, 4).front(), 0u);
}

TEST_F(Engine, SelectedBlocksRunAlone) {
  set_schedule({.selected = [](std::uint32_t block) { return block == 1 || block == 3; }});
  std::vector<std::uint32_t> sequence(128, 99);
  std::uint32_t length = 0;
  ASSERT_EQ(planted::trace(sequence.data(), &length, 1000), 0) << last_fault();
  EXPECT_EQ(length, 128u);
  EXPECT_EQ(std::set<std::uint32_t>(sequence.begin(), sequence.end()),
            (std::set<std::uint32_t>{1, 3}));
}

TEST_F(Engine, LaunchesAreListed) {
  clear_launches();
  ASSERT_EQ(planted::launch_shape(7, 64, 128), 0);
  ASSERT_EQ(launches().size(), 1u);
  EXPECT_EQ(launches()[0].grid[0], 7u);
  EXPECT_EQ(launches()[0].block[0], 64u);
  EXPECT_EQ(launches()[0].shared_bytes, 128u);
}

TEST_F(Engine, IllegalLaunchesAreRefused) {
  EXPECT_NE(planted::launch_shape(0, 32, 0), 0);
  EXPECT_EQ(last_fault(), "a grid of 0 blocks");
  EXPECT_NE(planted::launch_shape(1, 0, 0), 0);
  EXPECT_EQ(last_fault(), "a block of 0 threads");
  EXPECT_NE(planted::launch_shape(1, 1025, 0), 0);
  EXPECT_EQ(last_fault(), "a block of 1025 threads");
  EXPECT_NE(planted::launch_shape(1, 32, 227 * 1024 + 1), 0);
  EXPECT_EQ(last_fault(), "232449 bytes of dynamic shared memory, the limit is 232448");
  EXPECT_NE(planted::launch_large_arguments(), 0);
  EXPECT_EQ(last_fault(), "32768 bytes of arguments, the limit is 32764");
  EXPECT_NE(take_last_error(), 0);
  EXPECT_EQ(take_last_error(), 0);
}

}  // namespace
}  // namespace cuda_on_cpu
