// SPDX-License-Identifier: BSD-3-Clause
// The collectives of operators, where the backend gives a Work for each and where it gives none for
// those that are not asynchronous, as NCCL's does since torch 2.8. The other rank brings the same.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/collectives.h>

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

}  // namespace
}  // namespace torchfuse::testing
