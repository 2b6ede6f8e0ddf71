// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/parallel/distributed_data_parallel.h>

#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "parallel_testing.h"
#include "sharded_testing.h"

namespace torchfuse::testing {
namespace {

using parallel::DistributedDataParallel;
using parallel::DistributedDataParallelOptions;
using torch::nn::Linear;
using torch::nn::Sequential;

class DataParallelErrors : public DataParallelTest {
 protected:
  Sequential net_{Linear(4, 3), Linear(3, 2)};
  torch::Tensor x_ = torch::randn({5, 4});
};

TEST_F(DataParallelErrors, BackwardWithoutForward) {
  DistributedDataParallel parallel(net_, group_);
  expect_error([&] { net_->forward(x_).sum().backward(); }, "backward() gave a gradient for '1.");
  const auto loss = parallel.forward(x_).sum();
  loss.backward({}, /*retain_graph=*/true);
  expect_error([&] { loss.backward(); },
               "Call forward() of DistributedDataParallel, not of the module. Add up losses that "
               "share a forward(), and call backward() once.");
}

TEST_F(DataParallelErrors, ParametersWithoutGradients) {
  DistributedDataParallel parallel(net_, group_);
  parallel.forward(x_);
  expect_error(
      [&] { net_->ptr<torch::nn::LinearImpl>(1)->weight.sum().backward(); },
      "expected backward() to give each parameter a gradient, got none for 3 of 4 "
      "parameters: '0.weight', '0.bias', '1.bias'. Make the loss depend on all parameters, "
      "freeze unused ones, or set find_unused_parameters.");
  parallel.forward(x_).sum().backward();  // the loop may go on
}

TEST_F(DataParallelErrors, AParameterIsReachedTwice) {
  DistributedDataParallel parallel(net_, group_);
  parallel.forward(x_);
  const auto weight = net_->ptr<torch::nn::LinearImpl>(1)->weight;
  // What was computed first comes last in backward, when the weight has been reached.
  const auto first = torch::ones({}, torch::requires_grad()) * 1.0;
  first.register_hook([&](const torch::Tensor&) {
    const torch::AutoGradMode with_grad(true);
    (weight * 2.0).sum().backward();
  });
  expect_error([&] { (first + weight.sum()).backward(); },
               "expected backward() to reach each parameter once, got '1.weight' twice.");
}

TEST_F(DataParallelErrors, ABackwardThatEndedEarly) {
  DistributedDataParallel parallel(net_, group_);
  const auto input = torch::randn({5, 4}, torch::requires_grad());
  const auto loss = parallel.forward(input).sum();
  input.register_hook([](const torch::Tensor& grad) -> torch::Tensor {
    throw std::runtime_error("out of luck");
    return grad;
  });
  EXPECT_ANY_THROW(loss.backward());
  expect_error([&] { parallel.forward(x_); },
               "forward() was called after an exception ended the last backward().");
}

TEST_F(DataParallelErrors, ARankThatIsLost) {
  DistributedDataParallel parallel(net_, group_);
  twin_->failure = "Connection closed by peer";
  expect_error(
      [&] { parallel.forward(x_).sum().backward(); },
      "expected all 2 ranks of group 'twins' in the reduction of gradients 1 of 1 "
      "('1.bias', '1.weight', '0.bias', '0.weight') within the group's timeout, got in rank "
      "0: Connection closed by peer. The group has no store to ask the other ranks through.");
}

TEST_F(DataParallelErrors, GradientsOfAnotherKind) {
  torch::nn::Embedding sparse(torch::nn::EmbeddingOptions(4, 3).sparse(true));
  DistributedDataParallel parallel(sparse, group_);
  expect_error(
      [&] { parallel.forward(torch::zeros({2}, torch::kLong)).sum().backward(); },
      "expected the gradient of 'weight' to be dense and match its parameter, Float [4, 3] on cpu, "
      "got layout Sparse");
  DistributedDataParallel converted(net_, group_);
  net_->to(torch::kDouble);
  expect_error(
      [&] { converted.forward(x_.to(torch::kDouble)); },
      "expected parameter '0.weight' to stay as it was at construction, Float [3, 4] on cpu, got "
      "Double [3, 4] on cpu. Convert and move the module before constructing "
      "DistributedDataParallel.");
}

TEST_F(DataParallelErrors, ACheckpointMayBeLoadedIntoTheModule) {
  DistributedDataParallel parallel(net_, group_);
  std::vector<torch::Tensor> grads;
  for (const bool loaded : {false, true}) {
    if (loaded) {
      std::stringstream checkpoint;
      torch::save(net_, checkpoint);
      torch::load(net_, checkpoint);
    }
    net_->zero_grad();
    parallel.forward(x_).sum().backward();
    grads.push_back(net_->parameters()[0].grad().clone());
  }
  EXPECT_TRUE(torch::equal(grads[0], grads[1])) << "the average, not the rank's own";
}

TEST_F(DataParallelErrors, AfterAMove) {
  DistributedDataParallel first(net_, group_);
  DistributedDataParallel second(std::move(first));
  const std::string expected =
      "torchfuse::parallel::DistributedDataParallel: expected a DistributedDataParallel, got "
      "a moved-from object.";
  expect_error([&] { first.forward(x_); }, expected);
  expect_error(
      [&] {
        const torch::NoGradGuard no_grad;
        first(x_);
      },
      expected);
  expect_error([&] { first.sync_buffers(); }, expected);
  expect_error([&] { first.buckets(); }, expected);
  expect_error([&] { const auto local = first.no_sync(); }, expected);
  first = std::move(second);
  first.forward(x_).sum().backward();
  expect_error([&] { second.forward(x_); }, expected);
}

TEST_F(DataParallelErrors, Construction) {
  const auto make = [&](const DistributedDataParallelOptions& options) {
    return [&] { DistributedDataParallel(net_, group_, options); };
  };
  expect_error(make(DistributedDataParallelOptions().bucket_bytes(0)),
               "expected bucket_bytes to be positive, got 0.");
  expect_error(make(DistributedDataParallelOptions().first_bucket_bytes(-1)),
               "expected first_bucket_bytes to be positive, got -1.");
  expect_error(
      [&] {
        DistributedDataParallel<torch::nn::LinearImpl>(Linear(1, 1),
                                                       c10::intrusive_ptr<c10d::ProcessGroup>());
      },
      "expected group to be a process group, got none.");
  for (auto& parameter : net_->parameters()) parameter.set_requires_grad(false);
  expect_error(make({}), "expected module to have parameters that require gradients, got none.");
  struct Meta : torch::nn::Module {
    Meta() { register_parameter("w", torch::ones({2}, torch::kMeta)); }
    torch::Tensor forward() { return named_parameters()["w"]; }
  };
  expect_error([&] { DistributedDataParallel(std::make_shared<Meta>(), group_); },
               "expected group 'twins' to reduce tensors on meta");
}

TEST(DataParallelRanks, OtherModulesAreRefused) {
  sharded_testing::expect_refusal(
      "torchfuse::parallel::DistributedDataParallel: expected the parameters and buffers to be the "
      "same on all ranks, got parameter 'weight' Float [3, 4] on rank 0 and parameter 'weight' "
      "Float [3, 5] on rank 1. Use the same model, options and calls in every process.",
      [](parallel::ProcessGroup& group) {
        DistributedDataParallel(Linear(4 + group.rank(), 3), group);
      });
}

}  // namespace
}  // namespace torchfuse::testing
