// SPDX-License-Identifier: BSD-3-Clause
// The lock around a step. One of the torch-free tests: the thread sanitizer watches what it guards.
#include "api/optim/step_lock.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <thread>
#include <vector>

namespace torchfuse::optim {
namespace {

TEST(StepLock, ThreadsTakeTurns) {
  constexpr std::size_t kThreads = 4;
  constexpr std::size_t kSteps = 2000;
  StepLock lock;
  std::vector<std::size_t> plan;  // as a step's: written and read without any other order
  std::size_t most = 0;
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (std::size_t k = 0; k < kSteps; ++k) {
        ASSERT_TRUE(lock.lock());
        plan.push_back(k);
        most = std::max(most, plan.size());
        if (plan.size() == kSteps) plan.clear();
        lock.unlock();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(most, kSteps);
  EXPECT_TRUE(plan.empty()) << "a step was lost: " << plan.size();
}

TEST(StepLock, RefusesTheThreadThatHoldsIt) {
  StepLock lock;
  ASSERT_TRUE(lock.lock());
  EXPECT_FALSE(lock.lock());
  EXPECT_FALSE(lock.lock()) << "being refused changes nothing";
  std::thread other([&] {
    EXPECT_TRUE(lock.lock()) << "another thread waits instead";
    lock.unlock();
  });
  lock.unlock();
  other.join();
  EXPECT_TRUE(lock.lock());
  lock.unlock();
}

}  // namespace
}  // namespace torchfuse::optim
