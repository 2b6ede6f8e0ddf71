// SPDX-License-Identifier: BSD-3-Clause
// FusedAdam's archives in memory; test_class_archive.cpp is about all classes.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>
#include <vector>

#include <torchfuse/optim/fused_adam.h>

#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using testing::load;
using testing::run_steps;
using testing::saved;
using testing::state_of;

TEST(FusedAdamArchive, TakesTheLayoutOfTheParameter) {
  const torch::Tensor rows = torch::randn({2, 3, 4, 5}).requires_grad_(true);
  FusedAdam optimizer(std::vector<torch::Tensor>{rows});
  run_steps(optimizer, {rows}, 0, 2);
  const torch::Tensor channels_last =
      rows.detach().contiguous(torch::MemoryFormat::ChannelsLast).requires_grad_(true);
  FusedAdam restored(std::vector<torch::Tensor>{channels_last});
  load(restored, saved(optimizer));
  EXPECT_EQ(state_of(restored, channels_last).exp_avg().strides(), channels_last.strides());
  run_steps(optimizer, {rows}, 2, 3);
  run_steps(restored, {channels_last}, 2, 3);
  EXPECT_TRUE(torch::equal(rows, channels_last));
}

TEST(FusedAdamArchive, SavesAStepCountWithoutTheBufferBehindIt) {
  std::vector<torch::Tensor> params;
  for (int i = 0; i < 200; ++i) params.push_back(torch::ones({1}).requires_grad_(true));
  FusedAdam optimizer(params);
  run_steps(optimizer, params, 0, 1);
  std::ostringstream stream;
  torch::serialize::OutputArchive archive;
  state_of(optimizer, params[7]).serialize(archive);
  archive.save_to(stream);
  std::istringstream input(stream.str());
  torch::serialize::InputArchive loaded;
  loaded.load_from(input);
  FusedAdamParamState state;
  state.serialize(loaded);
  EXPECT_EQ(state.step().storage().nbytes(), sizeof(float));
}

}  // namespace
}  // namespace torchfuse::optim
