// SPDX-License-Identifier: BSD-3-Clause
// Trains a small classifier in mixed precision, with clipping and loss scaling inside the step.
#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>

// 512 random points, labeled by the sign of their sum.
class Points : public torch::data::datasets::Dataset<Points> {
 public:
  torch::data::Example<> get(std::size_t index) override {
    const auto i = static_cast<std::int64_t>(index);
    return {data[i], target[i]};
  }
  std::optional<std::size_t> size() const override { return data.size(0); }

  torch::Tensor data = torch::randn({512, 16});
  torch::Tensor target = (data.sum(1) > 0).to(torch::kLong);
};

int main() {
  torch::manual_seed(0);
  const torch::Device device(torch::kCPU);  // or torch::kCUDA
  Points points;
  auto loader = torch::data::make_data_loader(points.map(torch::data::transforms::Stack<>()),
                                              torch::data::DataLoaderOptions(64));

  torch::nn::Sequential model(torch::nn::Linear(16, 32), torch::nn::ReLU(),
                              torch::nn::Linear(32, 2), torch::nn::LogSoftmax(1));
  model->to(device);
  // weight_decay is 0 by default, as in Python; torch's AdamW has 0.01.
  torchfuse::optim::FusedAdam optimizer(
      model->parameters(),
      torchfuse::optim::FusedAdamOptions(1e-2).weight_decay(0.01).max_grad_norm(1.0));
  torchfuse::amp::GradScaler scaler(device);

  for (int epoch = 0; epoch < 12; ++epoch) {
    for (auto& batch : *loader) {
      optimizer.zero_grad();
      torch::Tensor loss;
      {
        // bf16 needs no scaler.
        torchfuse::amp::AutocastGuard autocast(device.type(), torch::kHalf);
        loss = torch::nll_loss(model->forward(batch.data.to(device)), batch.target.to(device));
      }
      scaler.scale(loss).backward();
      scaler.step(optimizer);  // checks, unscales, clips and updates
      scaler.update();
    }
  }

  const torch::Tensor guess = model->forward(points.data.to(device)).argmax(1).cpu();
  const double accuracy = (guess == points.target).to(torch::kDouble).mean().item<double>();
  std::printf("quickstart.cpp: accuracy %.3f\n", accuracy);
  return accuracy > 0.95 ? 0 : 1;
}
