// SPDX-License-Identifier: BSD-3-Clause
// One process's model and all that changes while it trains.
#pragma once

#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <cstdint>
#include <optional>
#include <string>

namespace images {

/// Two convolutions around which the input goes, at half the size for stride 2.
struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t before, std::int64_t after, std::int64_t stride);
  torch::Tensor forward(const torch::Tensor& x);

  torch::nn::Conv2d conv1;
  torchfuse::nn::SyncBatchNorm norm1;
  torch::nn::Conv2d conv2;
  torchfuse::nn::SyncBatchNorm norm2;
  torch::nn::Conv2d shortcut{nullptr};  // none for stride 1
};
TORCH_MODULE(Block);

/// The network of examples/python/train_images.py, layer for layer.
struct ResNetImpl : torch::nn::Module {
  explicit ResNetImpl(std::int64_t classes);
  torch::Tensor forward(const torch::Tensor& x);

  torch::nn::Conv2d stem;
  torchfuse::nn::SyncBatchNorm norm;
  torch::nn::Sequential blocks;
  torch::nn::Linear head;
};
TORCH_MODULE(ResNet);

class Trainer {
 public:
  /// `precision`: fp32, bf16 or fp16. `steps`: of the whole cycle of the learning rate. `group`:
  /// the processes that share each batch; none: this process alone.
  Trainer(const std::string& precision, torch::Device device, std::int64_t classes,
          std::int64_t steps, const torchfuse::parallel::ProcessGroup* group);

  /// One step on this process's part of a batch; returns the loss of the whole batch.
  double step(const torch::Tensor& images, const torch::Tensor& labels);
  /// How many images of a batch the network labels correctly.
  std::int64_t correct(const torch::Tensor& images, const torch::Tensor& labels);
  /// Model, optimizer, scheduler and scaler, under the names of the Python program.
  torchfuse::Checkpoint checkpoint();
  /// For evaluation: until the end of the scope, the averages are in the weights' place.
  torchfuse::optim::EmaWeights averages() { return torchfuse::optim::EmaWeights(optimizer_); }
  ResNet& net() { return net_; }

 private:
  torch::Tensor logits(const torch::Tensor& images, bool training);

  torch::Device device_;
  std::optional<torch::ScalarType> dtype_;
  const torchfuse::parallel::ProcessGroup* group_;
  ResNet net_;
  std::optional<torchfuse::parallel::DistributedDataParallel<ResNetImpl>> model_;
  torchfuse::optim::FusedSGD optimizer_;
  torchfuse::optim::OneCycleLR scheduler_;
  torchfuse::amp::GradScaler scaler_;
};

}  // namespace images
