// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/parallel/distributed_data_parallel.h>

#include "parallel_testing.h"

namespace torchfuse::testing {
namespace {

using parallel::DistributedDataParallel;
using torch::nn::Linear;

/// A layer whose twin on the other rank has three times its gradients.
class NoSync : public DataParallelTest {
 protected:
  NoSync() {
    twin_->reductions.clear();
    twin_->other = 3.0;
  }

  void forward_and_backward() { parallel_.forward(x_).square().sum().backward(); }

  bool reduced() const { return !twin_->reductions.empty(); }

  void expect_gradient(double factor) const {
    EXPECT_TRUE(torch::allclose(net_->weight.grad(), alone_ * factor, 1e-6, 1e-7))
        << net_->weight.grad() << alone_ * factor;
  }

  Linear net_{4, 3};
  torch::Tensor x_ = torch::randn({5, 4});
  torch::Tensor alone_ =
      torch::autograd::grad({net_->forward(x_).square().sum()}, {net_->weight})[0];
  DistributedDataParallel<torch::nn::LinearImpl> parallel_{net_, group_};
};

TEST_F(NoSync, NothingIsReduced) {
  {
    const auto local = parallel_.no_sync();
    forward_and_backward();
    EXPECT_FALSE(reduced());
    expect_gradient(1.0);
    {
      const auto nested = parallel_.no_sync();
    }
    forward_and_backward();
    EXPECT_FALSE(reduced()) << "the inner guard restored what it found";
  }
  forward_and_backward();
  EXPECT_TRUE(reduced());
  expect_gradient(3 * (1.0 + 3.0) / 2);
}

TEST_F(NoSync, OneLoopBodyServesAllPartsOfAnAccumulation) {
  constexpr int kParts = 3;
  for (int part = 0; part < kParts; ++part) {
    EXPECT_FALSE(reduced()) << "before part " << part;
    const auto local = parallel_.no_sync(part + 1 < kParts);
    forward_and_backward();
  }
  EXPECT_TRUE(reduced());
  expect_gradient(kParts * (1.0 + 3.0) / 2);
}

TEST_F(NoSync, AGuardThatChangesNothingKeepsTheOuterOne) {
  {
    const auto local = parallel_.no_sync();
    const auto unchanged = parallel_.no_sync(false);
    forward_and_backward();
    EXPECT_FALSE(reduced());
  }
  forward_and_backward();
  EXPECT_TRUE(reduced());
}

}  // namespace
}  // namespace torchfuse::testing
