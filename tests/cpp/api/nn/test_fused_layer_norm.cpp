// SPDX-License-Identifier: BSD-3-Clause
// FusedLayerNorm and FusedRMSNorm in LibTorch: torch's numbers, states and errors.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/nn/fused_layer_norm.h>

#include <sstream>
#include <vector>

#include "../optim/optim_testing.h"

namespace torchfuse::nn {
namespace {

TEST(FusedLayerNorm, HasTorchsOutputAndGradients) {
  torch::manual_seed(0);
  for (const bool efficient : {false, true}) {
    FusedLayerNorm ours(FusedLayerNormOptions({3, 8}).eps(1e-3).memory_efficient(efficient));
    torch::nn::LayerNorm theirs(torch::nn::LayerNormOptions({3, 8}).eps(1e-3));
    {
      const torch::NoGradGuard no_grad;
      ours->weight.uniform_(0.5, 1.5);
      ours->bias.normal_();
      theirs->weight.copy_(ours->weight);
      theirs->bias.copy_(ours->bias);
    }
    const auto x = torch::randn({5, 3, 8});
    const auto a = x.clone().requires_grad_();
    const auto b = x.clone().requires_grad_();
    const auto y = ours(a);
    EXPECT_TRUE(torch::allclose(y, theirs(b), 1e-5, 1e-5));
    y.square().sum().backward();
    theirs(b).square().sum().backward();
    EXPECT_TRUE(torch::allclose(a.grad(), b.grad(), 1e-4, 1e-4));
    EXPECT_TRUE(torch::allclose(ours->weight.grad(), theirs->weight.grad(), 1e-4, 1e-4));
    EXPECT_TRUE(torch::allclose(ours->bias.grad(), theirs->bias.grad(), 1e-4, 1e-4));
  }
}

TEST(FusedRMSNorm, IsTheFormula) {
  FusedRMSNorm norm(std::vector<std::int64_t>{16});
  const auto x = torch::randn({4, 16}, torch::kDouble);
  const auto expected = x * (x.square().mean(-1, /*keepdim=*/true) + 1e-5).rsqrt();
  EXPECT_TRUE(torch::allclose(norm(x), expected, 1e-10, 1e-10));
  EXPECT_EQ(norm->parameters().size(), 1U);
}

TEST(FusedLayerNorm, CloneAndStateKeepTheParameters) {
  FusedLayerNorm norm(FusedLayerNormOptions({4}));
  {
    const torch::NoGradGuard no_grad;
    norm->weight.fill_(2);
  }
  const auto twin = std::dynamic_pointer_cast<FusedLayerNormImpl>(norm->clone());
  const auto x = torch::randn({3, 4});
  EXPECT_TRUE(torch::equal(twin->forward(x), norm(x)));
  EXPECT_FALSE(twin->weight.is_alias_of(norm->weight));
  std::stringstream stream;
  torch::save(norm, stream);
  FusedLayerNorm loaded(FusedLayerNormOptions({4}));
  torch::load(loaded, stream);
  EXPECT_TRUE(torch::equal(loaded(x), norm(x)));
}

TEST(FusedLayerNorm, OptionsAreKept) {
  FusedLayerNorm plain(FusedLayerNormOptions({4}).elementwise_affine(false));
  EXPECT_TRUE(plain->parameters().empty());
  FusedLayerNorm half(FusedLayerNormOptions({4}).bias(false));
  EXPECT_EQ(half->parameters().size(), 1U);
  std::ostringstream text;
  text << *half;
  EXPECT_EQ(text.str(),
            "torchfuse::nn::FusedLayerNorm([4], eps=1e-05, elementwise_affine=true, "
            "memory_efficient=false)");
}

TEST(FusedLayerNorm, BadInputIsNamed) {
  testing::expect_error(
      [] { FusedLayerNorm norm(FusedLayerNormOptions(std::vector<std::int64_t>{})); },
      "FusedLayerNorm: expected normalized_shape to have at least one size");
  FusedLayerNorm norm(FusedLayerNormOptions({4}));
  testing::expect_error(
      [&] { norm(torch::zeros({2, 5})); },
      "FusedLayerNorm: expected input to end in the dimensions normalized_shape = [4], "
      "got an input of shape [2, 5]");
  testing::expect_error([&] { norm(at::Tensor()); },
                        "FusedLayerNorm: expected input to be a tensor");
  testing::expect_error([&] { norm(torch::zeros({2, 4}, torch::kLong)); },
                        "FusedLayerNorm: expected input to be of dtype");
}

}  // namespace
}  // namespace torchfuse::nn
