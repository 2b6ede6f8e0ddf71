// SPDX-License-Identifier: BSD-3-Clause
// One process with each backend, through everything that communicates: its averages are its own.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/collectives.h>
#include <torchfuse/nn/sync_batch_norm.h>
#include <torchfuse/optim/fused_adam.h>
#include <torchfuse/parallel/convert_sync_batch_norm.h>
#include <torchfuse/parallel/distributed_data_parallel.h>
#include <torchfuse/parallel/process_group.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <string>
#include <vector>

namespace torchfuse::testing {
namespace {

using torch::nn::Linear;
using torch::nn::Sequential;

Sequential make_net(torch::Device device) {
  torch::manual_seed(0);
  Sequential net(Linear(4, 6), nn::SyncBatchNorm(6), Linear(6, 2));
  net->to(device);
  return net;
}

/// The parameters and buffers after three steps.
template <class Forward>
std::vector<torch::Tensor> trained(const Sequential& net, const Forward& forward) {
  torch::manual_seed(1);
  const torch::Device device = net->parameters().front().device();
  optim::FusedAdam optimizer(net->parameters());
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    forward(torch::randn({8, 4}).to(device)).square().mean().backward();
    optimizer.step();
  }
  std::vector<torch::Tensor> result = net->parameters();
  for (const auto& buffer : net->buffers()) result.push_back(buffer);
  return result;
}

class WorldOfOne : public ::testing::TestWithParam<std::string> {};

TEST_P(WorldOfOne, TrainsAsAPlainModule) {
  const std::string& backend = GetParam();
  if (backend == "nccl" && !torch::cuda::is_available()) GTEST_SKIP() << "needs a CUDA device";
  const torch::Device device = backend == "nccl" ? torch::kCUDA : torch::kCPU;
  auto options = parallel::ProcessGroupOptions().backend(backend).rank(0).world_size(1);
  parallel::ProcessGroup group = parallel::init_process_group(
      c10::make_intrusive<c10d::HashStore>(), options.timeout(std::chrono::seconds(30)));
  const torch::Tensor value = torch::full({2}, 3.0, device);
  all_reduce_(value, "sum", {group.name()});
  all_reduce_sum_(value, group.name(), "WorldOfOne", /*deterministic=*/true);
  group.barrier();
  EXPECT_TRUE(torch::equal(value.cpu(), torch::full({2}, 3.0)));

  Sequential plain = make_net(device);
  Sequential net = make_net(device);
  ASSERT_EQ(parallel::convert_sync_batch_norm(*net, group.name()), 1);
  parallel::DistributedDataParallel replica(net.ptr(), group);
  const auto expected = trained(plain, [&](const torch::Tensor& x) { return plain->forward(x); });
  const auto found = trained(net, [&](const torch::Tensor& x) { return replica.forward(x); });
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(
        torch::allclose(found[i].to(torch::kDouble), expected[i].to(torch::kDouble), 1e-6, 1e-7))
        << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, WorldOfOne, ::testing::Values("gloo", "nccl"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace torchfuse::testing
