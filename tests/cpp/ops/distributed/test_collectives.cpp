// SPDX-License-Identifier: BSD-3-Clause
// The collectives of operators, where the backend gives a Work for each and where it gives none for
// those that are not asynchronous, as NCCL's does since torch 2.8. The other rank brings the same.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/collectives.h>
#include <torchfuse/missing_ranks.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../../api/expect_error.h"
#include "../../api/fake_group.h"

namespace torchfuse::testing {
namespace {

class Twins : public FakeBackend {
 public:
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    if (options.reduceOp == c10d::ReduceOp::SUM) tensors.at(0).mul_(2);
    return work(options.asyncOp);
  }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& all, at::Tensor& own,
                                                 const c10d::AllgatherOptions& options) override {
    for (int rank = 0; rank < 2; ++rank) all.view({2, -1})[rank].copy_(own);
    return work(options.asyncOp);
  }
};

class Collectives : public ::testing::TestWithParam<bool> {
 protected:
  Collectives() { twins_->gives_work = GetParam(); }
  void TearDown() override {
    EXPECT_EQ(twins_->waits, twins_->works) << "what can be waited for is";
  }

  static constexpr const char* kName = "torchfuse_test_collectives";
  c10::intrusive_ptr<Twins> twins_ = c10::make_intrusive<Twins>();
  RegisteredGroup group_{twins_, kName};
};

TEST_P(Collectives, SumsOfLayers) {
  for (const bool deterministic : {false, true}) {
    const at::Tensor value = torch::arange(6, torch::kDouble);
    all_reduce_sum_(value, kName, "layer", deterministic);
    EXPECT_TRUE(torch::equal(value, 2 * torch::arange(6, torch::kDouble))) << deterministic;
  }
}

TEST_P(Collectives, SumsAndMaximaOfNorms) {
  const at::Tensor value = torch::arange(6, torch::kDouble);
  all_reduce_(value, "max", {kName});
  EXPECT_TRUE(torch::equal(value, torch::arange(6, torch::kDouble)));
  all_reduce_(value, "sum", {kName, kName});
  EXPECT_TRUE(torch::equal(value, 4 * torch::arange(6, torch::kDouble)));
}

TEST_P(Collectives, ComparisonOfRanks) {
  check_same_in_all_ranks({"a", "b"}, {3, 4}, torch::kCPU, kName, "layer");
}

TEST_P(Collectives, ALostRankIsNamed) {
  twins_->failure = "Connection closed by peer\nat some line";
  EXPECT_EQ(error_of([] { all_reduce_(torch::ones({2}), "sum", {kName}); }),
            "torchfuse::all_reduce_: the exchange between the 2 ranks of the process group "
            "'torchfuse_test_collectives' failed in rank 0. The group has no store to ask the "
            "other ranks through. The backend says: Connection closed by peer");
}

INSTANTIATE_TEST_SUITE_P(Backends, Collectives, ::testing::Bool(), [](const auto& info) {
  return info.param ? "WorkForEach" : "WorkForAsynchronousOnly";
});

// --- Which ranks give no sign in a group's store -------------------------------------------------

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
  expect_error([&] { missing_ranks(store, "ready/", -1, std::chrono::milliseconds(1)); },
               "missing_ranks: expected size to be at least 0, got -1.");
}

TEST(MissingRanks, NoneOneOrSeveralInWords) {
  EXPECT_EQ(rank_list({}), "no rank");
  EXPECT_EQ(rank_list({2}), "rank 2");
  EXPECT_EQ(rank_list({1, 3}), "ranks 1, 3");
}

}  // namespace
}  // namespace torchfuse::testing
