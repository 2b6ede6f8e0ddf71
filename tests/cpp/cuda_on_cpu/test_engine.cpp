// SPDX-License-Identifier: BSD-3-Clause
// What the emulation computes and in which order it runs threads.
#include "engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "planted_kernels.h"

namespace cuda_on_cpu {
namespace {

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
      EXPECT_EQ(at(Row::kShfl), warp + 5);
      EXPECT_EQ(at(Row::kDown), lane < 29 ? i + 3 : i);
      EXPECT_EQ(at(Row::kXor), i ^ 1u);
      EXPECT_EQ(at(Row::kOr), 1u);
      EXPECT_EQ(at(Row::kNone), 0u);
      EXPECT_EQ(at(Row::kSegment), lane % 8 < 7 ? i + 1 : i);
    }
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

TEST_F(Engine, ASeedShufflesBlocksAndTheThreadsOfResidentOnes) {
  const auto first = trace_of({.seed = 5}, 6);
  EXPECT_EQ(first, trace_of({.seed = 5}, 6));
  auto sorted = first;
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t i = 0; i < sorted.size(); ++i) EXPECT_EQ(sorted[i], i / 64);
  std::set<std::uint32_t> first_blocks;
  for (std::uint64_t seed = 1; seed < 20; ++seed) {
    first_blocks.insert(trace_of({.seed = seed, .resident_blocks = 1}, 4).front());
  }
  EXPECT_EQ(first_blocks.size(), 4u);
  EXPECT_EQ(trace_of({.resident_blocks = 1}, 4).front(), 0u);
  EXPECT_EQ(changes(trace_of({.seed = 3, .resident_blocks = 1}, 4)), 3u);
  EXPECT_GT(changes(trace_of({.seed = 3, .resident_blocks = 2}, 4)), 30u);
  const auto four = trace_of({.seed = 3, .resident_blocks = 4}, 4);
  EXPECT_EQ(std::set<std::uint32_t>(four.begin(), four.begin() + 64).size(), 4u);
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
