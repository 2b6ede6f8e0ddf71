// SPDX-License-Identifier: BSD-3-Clause
// A folder for sharded checkpoints, and a model whose states they hold.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "sharded_testing.h"

namespace torchfuse::sharded_testing {

/// Begins the messages of loading.
inline constexpr const char* kLoads = "load_sharded_checkpoint: ";

/// It is empty, and removed in the end.
class ShardedFolder {
 public:
  ShardedFolder() {
    static int folders = 0;
    path_ = std::filesystem::path(::testing::TempDir()) /
            ("sharded" + std::to_string(::getpid()) + "_" + std::to_string(folders++));
    std::filesystem::create_directories(path_);
  }
  ~ShardedFolder() { std::filesystem::remove_all(path_); }
  ShardedFolder(const ShardedFolder&) = delete;
  ShardedFolder& operator=(const ShardedFolder&) = delete;

  std::string path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ / name; }
  /// The names of its files, in order.
  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) {
      names.push_back(entry.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  /// The path of the file of a rank.
  std::string file_of(int rank) const {
    const std::string begin = "rank" + std::to_string(rank) + "-";
    for (const std::string& name : files()) {
      if (name.starts_with(begin)) return *this / name;
    }
    return "none";
  }
  /// Makes a file.
  void write(const std::string& name) const { std::ofstream(*this / name) << "text"; }

 private:
  std::filesystem::path path_;
};

/// A model of sharded_params().
struct ShardedModel : torch::nn::Module {
  ShardedModel() {
    for (const torch::Tensor& param : sharded_params()) {
      register_parameter("p" + std::to_string(parameters().size()), param);
    }
  }
};

}  // namespace torchfuse::sharded_testing
