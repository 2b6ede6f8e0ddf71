// SPDX-License-Identifier: BSD-3-Clause
// A group of two ranks in one process: the other rank is a backend that brings the same numbers.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/parallel/distributed_data_parallel.h>

#include <string>
#include <vector>

#include "../expect_error.h"
#include "../fake_group.h"

namespace torchfuse::testing {

/// Rank 0 of two; rank 1 has the same values everywhere, times `other` in reductions.
class Twin : public FakeBackend {
 public:
  struct Reduction {
    at::Tensor tensor;
    c10d::ReduceOp::RedOpType operation;
    bool async;
  };

  using FakeBackend::FakeBackend;

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    const c10d::ReduceOp::RedOpType operation = options.reduceOp;
    reductions.push_back({tensors.at(0), operation, options.asyncOp});
    if (tensors.at(0).is_floating_point()) {
      tensors.at(0).mul_(operation == c10d::ReduceOp::AVG ? (1.0 + other) / 2 : 1.0 + other);
    } else {
      tensors.at(0).add_(flags);
    }
    return work();
  }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>&,
                                           const c10d::BroadcastOptions& options) override {
    EXPECT_EQ(options.rootRank, 0);
    ++broadcasts;
    return work();
  }

  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override { return work(); }

  double other = 1.0;      ///< rank 1's gradients, in units of rank 0's
  std::int64_t flags = 0;  ///< what rank 1 adds to integers
  int broadcasts = 0;
  std::vector<Reduction> reductions;
};

class DataParallelTest : public ::testing::Test {
 protected:
  explicit DataParallelTest(const std::string& backend = "twin") {
    torch::manual_seed(1);
    twin_ = c10::make_intrusive<Twin>(backend);
    group_ = group_over(twin_, "twins");
  }

  c10::intrusive_ptr<Twin> twin_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace torchfuse::testing
