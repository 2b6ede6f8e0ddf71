// SPDX-License-Identifier: BSD-3-Clause
// A model, an optimizer and a folder, for the tests of checkpoints.
#pragma once

#include <dirent.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/checkpoint.h>
#include <torchfuse/optim/fused_adam.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "../optim/optim_testing.h"

namespace torchfuse::checkpoint_testing {

using optim::FusedAdam;
using optim::FusedAdamOptions;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(std::int64_t width = 3)
      : fc(register_module("fc", torch::nn::Linear(2, width))),
        bn(register_module("bn", torch::nn::BatchNorm1d(width))) {}
  torch::Tensor forward(const torch::Tensor& x) { return bn(fc(x)); }
  torch::nn::Linear fc{nullptr};
  torch::nn::BatchNorm1d bn{nullptr};
};
TORCH_MODULE(Net);

inline void train(Net& model, torch::optim::Optimizer& optimizer, int steps = 2) {
  for (int i = 0; i < steps; ++i) {
    optimizer.zero_grad();
    model(torch::randn({4, 2})).pow(2).sum().backward();
    optimizer.step();
  }
}

inline std::vector<torch::Tensor> snapshot(const Net& model, const FusedAdam& optimizer) {
  std::vector<torch::Tensor> tensors;
  for (const auto& tensor : model->parameters()) tensors.push_back(tensor.detach().clone());
  for (const auto& tensor : model->buffers()) tensors.push_back(tensor.clone());
  const auto states = optimizer.state_dict().at("state").toGenericDict();
  for (const auto& state : states) {
    for (const auto& item : state.value().toGenericDict()) {
      tensors.push_back(item.value().toTensor().clone());
    }
  }
  return tensors;
}

using testing::error_of;
using testing::expect_equal;

/// Of an expression.
#define EXPECT_ERROR(action, part) testing::expect_error([&] { action; }, part)

/// The bytes of a file.
inline std::string contents(const std::string& path) {
  std::stringstream stream;
  stream << std::ifstream(path, std::ios::binary).rdbuf();
  return stream.str();
}

class CheckpointTest : public ::testing::Test {
 protected:
  CheckpointTest() {
    // libtorch.so exports parts of std::filesystem that do not work.
    std::string pattern = ::testing::TempDir() + "torchfuse-checkpoint-XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
    path_ = folder_ + "/last.pt";
    torch::manual_seed(1);
    model_ = Net();
    optimizer_ = std::make_unique<FusedAdam>(model_->parameters(), FusedAdamOptions(0.1));
  }
  ~CheckpointTest() override {
    for (const std::string& name : files()) ::unlink((folder_ + "/" + name).c_str());
    ::rmdir(folder_.c_str());
  }

  Checkpoint description() { return Checkpoint().model(*model_).optimizer(*optimizer_); }
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    DIR* const folder = ::opendir(folder_.c_str());
    while (const dirent* entry = ::readdir(folder)) {
      if (entry->d_name[0] != '.') names.emplace_back(entry->d_name);
    }
    ::closedir(folder);
    return names;
  }

  std::string folder_;
  std::string path_;
  Net model_{nullptr};
  std::unique_ptr<FusedAdam> optimizer_;
};

}  // namespace torchfuse::checkpoint_testing
