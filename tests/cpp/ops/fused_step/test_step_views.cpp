// SPDX-License-Identifier: BSD-3-Clause
// Step counts as elements of one buffer per device.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/step_views.h>

#include <vector>

namespace torchfuse {
namespace {

TEST(StepViews, AreSeparateElementsOfOneBuffer) {
  const std::vector<at::Tensor> params{torch::ones({2}), torch::ones({3})};
  const auto steps = step_views(params, {torch::full({}, 4.0), at::Tensor()});
  EXPECT_EQ(steps[0].item<float>(), 4.0f);
  EXPECT_EQ(steps[1].item<float>(), 0.0f);
  EXPECT_TRUE(steps[0].is_alias_of(steps[1]));
  steps[0].add_(1);
  EXPECT_EQ(steps[1].item<float>(), 0.0f);
  const auto again = step_views(params, steps);
  EXPECT_TRUE(again[0].is_same(steps[0]) && again[1].is_same(steps[1]));
}

TEST(StepViews, AreKeptWhenParametersJoin) {
  const std::vector<at::Tensor> params{torch::ones({2}), torch::ones({3}), torch::ones({4})};
  const auto first = step_views({params[0]}, {torch::full({}, 4.0)});
  const auto steps = step_views(params, {first[0], torch::full({}, 2.0), first[0]});
  EXPECT_TRUE(steps[0].is_same(first[0]));
  EXPECT_FALSE(steps[2].is_alias_of(first[0])) << "an element is one step's alone";
  EXPECT_TRUE(steps[1].is_alias_of(steps[2]));
  EXPECT_EQ(steps[1].item<float>(), 2.0f);
  EXPECT_EQ(steps[2].item<float>(), 4.0f);
}

}  // namespace
}  // namespace torchfuse
