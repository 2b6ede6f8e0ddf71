// SPDX-License-Identifier: BSD-3-Clause
// Which ranks give no sign in a group's store.
#include <gtest/gtest.h>
#include <torchfuse/missing_ranks.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../../api/expect_error.h"

namespace torchfuse {
namespace {

using Ranks = std::vector<std::int64_t>;

TEST(MissingRanks, AreThoseWithoutAKey) {
  c10d::HashStore store;
  store.set("ready/1", std::vector<std::uint8_t>{1});
  Ranks seen;
  const auto note = [&](std::int64_t rank) { seen.push_back(rank); };
  EXPECT_EQ(missing_ranks(store, "ready/", 3, std::chrono::milliseconds(20), note), (Ranks{0, 2}));
  EXPECT_EQ(seen, (Ranks{1})) << "once, however often the store is asked";
}

TEST(MissingRanks, NobodyWaitsWhereAllAreThere) {
  c10d::HashStore store;
  for (const char* key : {"ready/0", "ready/1"}) store.set(key, std::vector<std::uint8_t>{1});
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(missing_ranks(store, "ready/", 2, std::chrono::hours(1)), Ranks());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::minutes(1));
}

TEST(MissingRanks, WhatTheCallerThrowsEndsTheWait) {
  c10d::HashStore store;
  store.set("ready/1", std::vector<std::uint8_t>{1});
  const auto refuse = [](std::int64_t) { throw std::runtime_error("refused"); };
  EXPECT_THROW(missing_ranks(store, "ready/", 2, std::chrono::hours(1), refuse),
               std::runtime_error);
}

TEST(MissingRanks, TheLongestTimeIsNotOver) {
  c10d::HashStore store;
  store.set("ready/0", std::vector<std::uint8_t>{1});
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    store.set("ready/1", std::vector<std::uint8_t>{1});
  });
  EXPECT_EQ(missing_ranks(store, "ready/", 2, std::chrono::milliseconds::max()), Ranks());
  late.join();
}

TEST(MissingRanks, ANegativeSizeIsRefused) {
  c10d::HashStore store;
  testing::expect_error([&] { missing_ranks(store, "ready/", -1, std::chrono::milliseconds(1)); },
                        "missing_ranks: expected size to be at least 0, got -1.");
}

TEST(MissingRanks, NoneOneOrSeveralInWords) {
  EXPECT_EQ(rank_list({}), "no rank");
  EXPECT_EQ(rank_list({2}), "rank 2");
  EXPECT_EQ(rank_list({1, 3}), "ranks 1, 3");
}

}  // namespace
}  // namespace torchfuse
