// SPDX-License-Identifier: BSD-3-Clause
// The classic mixed-precision loop: scale, unscale, clip, step, update, with a checkpoint.
#pragma once

#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "../train_digits/data.h"

namespace tutorial {

/// A network, what trains it, and what it has recorded so far.
class Training {
 public:
  /// Builds everything from a fixed seed; the learning rate depends on `total_steps`.
  Training(torch::Device device, std::int64_t total_steps);

  /// The loop, with a progress bar called `name`. The data are on the device.
  void run(const digits::Digits& data, std::int64_t steps, const std::string& name);

  /// Writes all that training changes; without any one of them, a resumed run differs.
  void save(const std::filesystem::path& path) const;
  /// Restores what save() wrote.
  void load(const std::filesystem::path& path);

  /// Share of the test images that the network labels correctly, computed in fp32.
  double accuracy(const digits::Digits& data);
  /// A copy of all weights in one tensor.
  torch::Tensor weights() const;
  const std::vector<double>& losses() const { return losses_; }
  const std::vector<double>& scales() const { return scales_; }

 private:
  torch::Tensor step(const torch::Tensor& images, const torch::Tensor& labels);
  double learning_rate() const;

  torch::Device device_;
  std::int64_t total_steps_;
  torch::nn::Sequential model_;
  torchfuse::optim::FusedAdam optimizer_;
  torchfuse::amp::GradScaler scaler_;
  torch::Generator order_;  ///< of the images
  std::vector<double> losses_;
  std::vector<double> scales_;
};

}  // namespace tutorial
