// SPDX-License-Identifier: BSD-3-Clause
// One process's model, optimizer and scaler, and what a checkpoint holds of them.
#pragma once

#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

namespace digits {

/// The network of examples/python/distributed_digits.py, layer for layer.
struct NetImpl : torch::nn::Module {
  NetImpl();
  torch::Tensor forward(torch::Tensor x);

  torch::nn::Conv2d conv1;
  torchfuse::nn::SyncBatchNorm norm1;
  torch::nn::Conv2d conv2;
  torchfuse::nn::SyncBatchNorm norm2;
  torch::nn::Linear hidden;
  torch::nn::Linear output;
};
TORCH_MODULE(Net);

class DistributedTrainer {
 public:
  /// `precision`: fp32, bf16 or fp16.
  DistributedTrainer(const std::string& precision, torch::Device device,
                     const torchfuse::parallel::ProcessGroup& group);

  /// One step on this process's share; returns the loss of the whole batch.
  torch::Tensor step(const torch::Tensor& images, const torch::Tensor& labels);

  /// Share of the images that are labeled correctly. Every process may call it alone.
  double accuracy(const torch::Tensor& images, const torch::Tensor& labels);

  /// Writes a checkpoint, complete or not at all.
  void save(const std::filesystem::path& path, std::int64_t epoch);
  /// Reads a checkpoint; returns the number of epochs before it.
  std::int64_t load(const std::filesystem::path& path);

 private:
  torch::Device device_;
  std::optional<torch::ScalarType> dtype_;
  std::string group_;
  std::int64_t world_size_;
  Net net_;
  torchfuse::parallel::DistributedDataParallel<NetImpl> model_;
  torchfuse::optim::FusedAdam optimizer_;
  torchfuse::amp::GradScaler scaler_;
};

}  // namespace digits
