// SPDX-License-Identifier: BSD-3-Clause
// All ranks learn whether all have the same number.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/collectives.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <thread>

#include "../../api/parallel/sharded_testing.h"

namespace torchfuse::sharded_testing {
namespace {

using parallel::ProcessGroup;

bool same(const ProcessGroup& group, std::int64_t number) {
  return same_on_all_ranks(*group.get(), torch::kCPU, number);
}

TEST(SameOnAllRanks, OneOtherNumberIsSeenByAll) {
  for (const std::int64_t ranks : {1, 2, 3, 4, 5, 8}) {
    SCOPED_TRACE(c10::str(ranks, " ranks"));
    run_on_ranks(ranks, [&](ProcessGroup& group) {
      const auto rank = group.rank();
      EXPECT_TRUE(same(group, 7));
      for (std::int64_t other = 0; other < ranks && ranks > 1; ++other) {
        EXPECT_FALSE(same(group, rank == other ? 6 : 7)) << other;
        EXPECT_FALSE(same(group, rank == other ? 8 : 7)) << other;
        EXPECT_TRUE(same(group, -other)) << other;
      }
    });
  }
}

TEST(SameOnAllRanks, NumbersHave64Bits) {
  using Limits = std::numeric_limits<std::int64_t>;
  run_on_ranks(3, [](ProcessGroup& group) {
    for (const std::int64_t number : {Limits::min(), Limits::max(), std::int64_t{-1}}) {
      EXPECT_TRUE(same(group, number));
      EXPECT_FALSE(same(group, group.rank() == 1 ? number ^ 1 : number));
    }
  });
}

TEST(SameOnAllRanks, ARankThatDoesNotArriveIsAnError) {
  std::atomic<int> failed = 0;
  on_ranks(
      3,
      [&](ProcessGroup& group) {
        if (group.rank() < 2) {
          EXPECT_ANY_THROW(same(group, 7));
          ++failed;
        }
        while (failed < 2) std::this_thread::yield();
      },
      std::chrono::milliseconds(500));
  EXPECT_EQ(failed, 2);
}

}  // namespace
}  // namespace torchfuse::sharded_testing
