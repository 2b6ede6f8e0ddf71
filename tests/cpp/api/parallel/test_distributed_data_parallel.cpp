// SPDX-License-Identifier: BSD-3-Clause
// Replicas of a module, with a twin on the other rank that has the same gradients, or three times
// as large ones.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/parallel/distributed_data_parallel.h>

#include <string>
#include <utility>
#include <vector>

#include "parallel_testing.h"

namespace torchfuse::testing {
namespace {

using parallel::DistributedDataParallel;
using parallel::DistributedDataParallelOptions;
using torch::nn::Linear;
using torch::nn::Sequential;

using Names = std::vector<std::vector<std::string>>;

/// Its first layer is the one that is registered last.
struct BackwardsImpl : torch::nn::Module {
  BackwardsImpl() {
    third = register_module("third", Linear(4, 2));
    second = register_module("second", Linear(4, 4));
    first = register_module("first", Linear(4, 4));
  }
  torch::Tensor forward(const torch::Tensor& x, bool all = true) {
    const auto hidden = torch::tanh(first(x));
    return third(all ? torch::tanh(second(hidden)) : hidden);
  }
  Linear first{nullptr}, second{nullptr}, third{nullptr};
};
TORCH_MODULE(Backwards);

std::vector<torch::Tensor> grads_of(const torch::nn::Module& module) {
  std::vector<torch::Tensor> grads;
  for (const auto& parameter : module.parameters()) grads.push_back(parameter.grad().clone());
  return grads;
}

void expect_equal(const std::vector<torch::Tensor>& found,
                  const std::vector<torch::Tensor>& expected, double factor) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(torch::allclose(found[i], expected[i] * factor, 1e-6, 1e-7)) << i;
  }
}

class DataParallel : public DataParallelTest {};

class DataParallelOnNccl : public DataParallelTest {
 protected:
  DataParallelOnNccl() : DataParallelTest("nccl") {}
};

TEST_F(DataParallel, TheBackendMayHaveNothingToWaitFor) {
  twin_->gives_work = false;
  Sequential net(torch::nn::BatchNorm1d(4), Linear(4, 2));
  const auto x = torch::randn({5, 4});
  net->forward(x).square().sum().backward();
  const auto expected = grads_of(*net);
  const auto options = DistributedDataParallelOptions().find_unused_parameters(true);
  DistributedDataParallel parallel(net, group_, options);
  twin_->other = 3.0;
  for (int step = 0; step < 2; ++step) {
    net->zero_grad();
    parallel.forward(x).square().sum().backward();
    expect_equal(grads_of(*net), expected, (1.0 + 3.0) / 2);
  }
  parallel.sync_buffers();
}

TEST_F(DataParallelOnNccl, LetsTheBackendAverage) {
  Sequential net(Linear(4, 2));
  const auto x = torch::randn({5, 4});
  net->forward(x).sum().backward();
  const auto expected = grads_of(*net);
  net->zero_grad();
  twin_->other = 3.0;
  DistributedDataParallel parallel(net, group_);
  twin_->reductions.clear();
  parallel.forward(x).sum().backward();
  expect_equal(grads_of(*net), expected, 2.0);
  ASSERT_EQ(twin_->reductions.size(), 1U);
  EXPECT_EQ(twin_->reductions[0].operation, c10d::ReduceOp::AVG);
}

TEST_F(DataParallel, BucketsAreReducedInOrderWithoutBlockingAndFormedAnewOnce) {
  Backwards net;
  const auto options = DistributedDataParallelOptions().first_bucket_bytes(1).bucket_bytes(80);
  DistributedDataParallel parallel(net, group_, options);
  const Names guess{{"first.bias"},
                    {"first.weight", "second.bias"},
                    {"second.weight", "third.bias", "third.weight"}};
  EXPECT_EQ(parallel.buckets(), guess);
  const auto step = [&] {
    twin_->reductions.clear();
    twin_->waits = 0;
    net->zero_grad();
    parallel.forward(torch::randn({5, 4})).sum().backward();
    std::vector<std::int64_t> sizes;
    for (const auto& reduction : twin_->reductions) {
      EXPECT_TRUE(reduction.async);
      EXPECT_EQ(reduction.operation, c10d::ReduceOp::SUM);
      sizes.push_back(reduction.tensor.numel());
    }
    EXPECT_EQ(twin_->waits, static_cast<int>(sizes.size()) + (twin_->broadcasts > 0 ? 1 : 0));
    twin_->broadcasts = 0;
    return sizes;
  };
  twin_->broadcasts = 0;
  EXPECT_EQ(step(), (std::vector<std::int64_t>{4, 20, 28})) << "third.bias ends at 16 bytes";
  EXPECT_EQ(parallel.buckets(), guess) << "gradients stay where they are after backward";
  step();
  const Names observed = parallel.buckets();
  EXPECT_EQ(observed.front().size(), 1U);
  EXPECT_EQ(observed.front()[0].substr(0, 5), "third");
  EXPECT_EQ(observed.back().back().substr(0, 5), "first");
  step();
  EXPECT_EQ(parallel.buckets(), observed) << "once";
}

TEST_F(DataParallel, GradientsAreViewsOfBuckets) {
  Backwards net;
  DistributedDataParallel parallel(net, group_);
  parallel.forward(torch::randn({5, 4})).sum().backward();
  for (const auto& parameter : net->parameters()) {
    EXPECT_TRUE(parameter.grad().is_alias_of(net->first->weight.grad()));
    EXPECT_FALSE(parameter.grad().is_view()) << "torch's zero_grad() detaches gradients";
  }
  const auto before = grads_of(*net);
  const auto* data = net->first->weight.grad().const_data_ptr();
  parallel.forward(torch::randn({5, 4}));  // forms buckets anew
  expect_equal(grads_of(*net), before, 1.0);
  EXPECT_NE(net->first->weight.grad().const_data_ptr(), data);
}

TEST_F(DataParallel, GradientsStartWhereKernelsAccessWholeVectors) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kDouble}) {
    Sequential net(Linear(3, 5), Linear(5, 1), Linear(1, 7));
    net->to(dtype);
    DistributedDataParallel parallel(net, group_);
    const auto x = torch::randn({2, 3}).to(dtype);
    for (int step = 0; step < 2; ++step) {  // the second in buckets that were formed anew
      parallel.forward(x).sum().backward();
      for (const auto& item : net->named_parameters()) {
        const auto address = reinterpret_cast<std::uintptr_t>(item.value().grad().const_data_ptr());
        EXPECT_EQ(address % 16, 0U) << item.key() << ' ' << dtype;
      }
    }
  }
}

TEST_F(DataParallel, AForwardWithoutGradientsIsLocal) {
  Sequential net(Linear(4, 4), torch::nn::BatchNorm1d(4));
  DistributedDataParallel parallel(net, group_);
  twin_->broadcasts = 0;
  {
    const torch::NoGradGuard no_grad;
    parallel.forward(torch::randn({5, 4}));
  }
  EXPECT_EQ(twin_->broadcasts, 0);
  parallel.forward(torch::randn({5, 4}));
  EXPECT_EQ(twin_->broadcasts, 2) << "floating point and integer buffers";
}

TEST_F(DataParallel, ForwardsOfOneBackwardShareItsBuffers) {
  Sequential net(Linear(4, 4), torch::nn::BatchNorm1d(4));
  DistributedDataParallel parallel(net, group_);
  twin_->broadcasts = 0;
  const auto x = torch::randn({5, 4});
  const auto first = parallel.forward(x).sum();
  {
    const auto local = parallel.no_sync();
    parallel.forward(x);
  }
  (first + parallel.forward(-x).sum()).backward();
  EXPECT_EQ(twin_->broadcasts, 2) << "floating point and integer buffers, once";
  parallel.forward(x);
  EXPECT_EQ(twin_->broadcasts, 2 + 1 + 2) << "with the order of gradients";
}

TEST_F(DataParallel, ABroadcastIsAWriteOnRank0Too) {
  Sequential net(Linear(4, 4), torch::nn::BatchNorm1d(4));
  DistributedDataParallel parallel(net, group_);
  const auto loss = parallel.forward(torch::randn({5, 4})).sum();
  parallel.sync_buffers();
  expect_error([&] { loss.backward(); }, "modified by an inplace operation");
}

TEST_F(DataParallel, BuffersOfChosenModulesAreKept) {
  Sequential net(Linear(4, 4), torch::nn::BatchNorm1d(4));
  const auto count = [&](const DistributedDataParallelOptions& options) {
    DistributedDataParallel parallel(net, group_, options);
    twin_->broadcasts = 0;
    parallel.forward(torch::randn({5, 4}));
    return twin_->broadcasts;
  };
  const auto is_norm = [](const torch::nn::Module& module) {
    return module.as<torch::nn::BatchNorm1dImpl>() != nullptr;
  };
  EXPECT_EQ(count(DistributedDataParallelOptions()), 2);
  EXPECT_EQ(count(DistributedDataParallelOptions().keeps_buffers(is_norm)), 0);
  EXPECT_EQ(count(DistributedDataParallelOptions().broadcast_buffers(false)), 0);
}

TEST_F(DataParallel, UnusedParametersGetWhatOtherRanksFound) {
  Backwards net;
  const auto options = DistributedDataParallelOptions().find_unused_parameters(true);
  DistributedDataParallel parallel(net, group_, options);
  const auto x = torch::randn({5, 4});
  parallel.forward(x, /*all=*/false).sum().backward();
  EXPECT_FALSE(net->second->weight.grad().defined()) << "no rank used it";
  EXPECT_TRUE(net->first->weight.grad().defined());
  {
    const auto local = parallel.no_sync();
    parallel.forward(x, /*all=*/true).sum().backward();
  }
  net->zero_grad();
  parallel.forward(x, /*all=*/false).sum().backward();
  EXPECT_FALSE(net->second->weight.grad().defined()) << "zero_grad() has dropped it";
  net->second->weight.mutable_grad() = torch::full({4, 4}, 7.0);
  parallel.forward(x, /*all=*/false).sum().backward();
  EXPECT_TRUE(torch::equal(net->second->weight.grad(), torch::full({4, 4}, 7.0)));
  EXPECT_FALSE(net->second->bias.grad().defined());
  twin_->flags = 1;  // rank 1 used all
  twin_->other = 3.0;
  parallel.forward(x, /*all=*/false).sum().backward();
  EXPECT_TRUE(torch::equal(net->second->weight.grad(), torch::full({4, 4}, 14.0)));
  EXPECT_TRUE(torch::equal(net->second->bias.grad(), torch::zeros({4})));
}

TEST_F(DataParallel, DtypesAreKeptApartFrozenParametersAreLeftOutSharedOnesCountOnce) {
  struct Mixed : torch::nn::Module {
    Mixed() {
      a = register_parameter("a", torch::ones({3}));
      b = register_parameter("b", torch::ones({3}, torch::kDouble));
      frozen = register_parameter("frozen", torch::ones({3}), /*requires_grad=*/false);
      again = register_parameter("again", a);
    }
    torch::Tensor forward() { return (a * b * frozen * again).sum(); }
    torch::Tensor a, b, frozen, again;
  };
  const auto net = std::make_shared<Mixed>();
  DistributedDataParallel parallel(net, group_);
  parallel.forward().backward();
  parallel.forward();
  Names buckets = parallel.buckets();
  std::sort(buckets.begin(), buckets.end());
  EXPECT_EQ(buckets, (Names{{"a"}, {"b"}}));
  EXPECT_TRUE(torch::equal(net->a.grad(), torch::full({3}, 2.0F)));
  EXPECT_TRUE(torch::equal(net->b.grad(), torch::ones({3}, torch::kDouble)));
}

TEST_F(DataParallel, LayoutsOfGradientsAreThoseOfParameters) {
  torch::nn::Conv2d net(torch::nn::Conv2dOptions(3, 4, 3));
  net->to(torch::kFloat);
  net->weight.set_data(net->weight.data().contiguous(torch::MemoryFormat::ChannelsLast));
  DistributedDataParallel parallel(net, group_);
  parallel.forward(torch::randn({2, 3, 5, 5})).sum().backward();
  EXPECT_EQ(net->weight.grad().strides(), net->weight.strides());
}

TEST_F(DataParallel, MovesAndEnds) {
  Backwards net;
  const auto x = torch::randn({5, 4});
  {
    DistributedDataParallel first(net, group_);
    DistributedDataParallel second(std::move(first));
    second(x).sum().backward();
    EXPECT_EQ(second.module().get(), net.get());
  }
  twin_->reductions.clear();
  net->forward(x).sum().backward();
  EXPECT_TRUE(twin_->reductions.empty()) << "the hooks are gone";
}

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
    const auto unchanged = parallel_.no_sync(false);
    forward_and_backward();
    EXPECT_FALSE(reduced()) << "an inner guard keeps or restores what it found";
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

}  // namespace
}  // namespace torchfuse::testing
