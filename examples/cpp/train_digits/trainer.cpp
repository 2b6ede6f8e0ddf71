// SPDX-License-Identifier: BSD-3-Clause
#include "trainer.h"

#include <torchfuse/torchfuse.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <vector>

#include "measure.h"

namespace digits {
namespace {

constexpr std::int64_t kBatchSize = 64;
constexpr double kLearningRate = 1.5e-3;
constexpr double kWeightDecay = 0.01;
constexpr double kMaxGradNorm = 1.0;
// Far below the default of 2,000, so that the scale also grows within the few hundred steps here.
constexpr std::int64_t kGrowthInterval = 60;
constexpr std::size_t kWarmUpSteps = 5;

torch::nn::Sequential make_model() {
  using torch::nn::Conv2d;
  using torch::nn::Conv2dOptions;
  using torch::nn::ReLU;
  return torch::nn::Sequential(Conv2d(Conv2dOptions(1, 16, 3).padding(1)), ReLU(),
                               Conv2d(Conv2dOptions(16, 32, 3).padding(1)), ReLU(),
                               torch::nn::MaxPool2d(2), torch::nn::Flatten(),
                               torch::nn::Linear(512, 64), ReLU(), torch::nn::Linear(64, 10));
}

/// The low-precision type of a mode; none for fp32.
std::optional<torch::ScalarType> dtype_of(const std::string& mode) {
  if (mode == "fp32") return std::nullopt;
  if (mode == "bf16") return torch::kBFloat16;
  if (mode == "fp16") return torch::kHalf;
  throw std::invalid_argument("expected the mode to be fp32, bf16 or fp16, got " + mode);
}

/// A model with its optimizer and loss scaler.
class Trainer {
 public:
  Trainer(const std::string& mode, torch::Device device)
      : device_(device),
        dtype_(dtype_of(mode)),
        model_(make_model_on(device)),
        optimizer_(model_->parameters(), torchfuse::optim::FusedAdamOptions(kLearningRate)
                                             .weight_decay(kWeightDecay)
                                             .max_grad_norm(kMaxGradNorm)),
        scaler_(device, torchfuse::amp::GradScalerOptions()
                            .growth_interval(kGrowthInterval)
                            .enabled(dtype_ == torch::kHalf)) {}

  /// One training step on a batch.
  void step(const torch::Tensor& images, const torch::Tensor& labels) {
    optimizer_.zero_grad();
    torch::Tensor loss;
    {
      const torchfuse::amp::AutocastGuard autocast(device_.type(), dtype_, dtype_.has_value());
      loss = torch::nn::functional::cross_entropy(model_->forward(images), labels);
    }
    scaler_.scale(loss).backward();
    // Checks, unscales, clips and updates in two reads of the gradients, and skips the update on
    // the device if the scale was too large: nothing here waits for a value.
    scaler_.step(optimizer_);
    scaler_.update();
  }

  /// Share of images that the model labels correctly, computed in fp32.
  double accuracy(const torch::Tensor& images, const torch::Tensor& labels) {
    const torch::NoGradGuard no_grad;
    const torch::Tensor predicted = model_->forward(images).argmax(1);
    return (predicted == labels).to(torch::kDouble).mean().item<double>();
  }

  double scale() const { return scaler_.is_enabled() ? scaler_.get_scale() : 1.0; }

 private:
  // The same initial weights in every run and, made on the CPU, on every device.
  static torch::nn::Sequential make_model_on(torch::Device device) {
    torch::manual_seed(0);
    torch::nn::Sequential model = make_model();
    model->to(device);
    return model;
  }

  torch::Device device_;
  std::optional<torch::ScalarType> dtype_;
  torch::nn::Sequential model_;
  torchfuse::optim::FusedAdam optimizer_;
  torchfuse::amp::GradScaler scaler_;
};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

Result train(const std::string& mode, const Digits& data, torch::Device device, int epochs) {
  const torch::Tensor images = data.train_images.to(device);
  const torch::Tensor labels = data.train_labels.to(device);
  // One throw-away step on two images: libraries loaded on first use are not training memory.
  Trainer(mode, device).step(images.narrow(0, 0, 2), labels.narrow(0, 0, 2));
  const PeakMemory memory(device);

  Trainer trainer(mode, device);
  const std::int64_t batches = labels.size(0) / kBatchSize;
  ProgressBar progress(mode, epochs * batches);
  std::vector<double> times;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    const torch::Tensor order = torch::randperm(labels.size(0), torch::kLong).to(device);
    for (std::int64_t batch = 0; batch < batches; ++batch) {
      const torch::Tensor chosen = order.narrow(0, batch * kBatchSize, kBatchSize);
      const auto start = std::chrono::steady_clock::now();
      trainer.step(images.index_select(0, chosen), labels.index_select(0, chosen));
      if (device.is_cuda()) torch::cuda::synchronize();
      const std::chrono::duration<double, std::milli> elapsed =
          std::chrono::steady_clock::now() - start;
      times.push_back(elapsed.count());
      progress.advance();
    }
  }
  progress.finish();
  if (times.size() > kWarmUpSteps) times.erase(times.begin(), times.begin() + kWarmUpSteps);

  Result result;
  result.peak_mib = memory.mib();
  result.step_ms = times.empty() ? 0.0 : median(times);
  result.final_scale = trainer.scale();
  result.accuracy = trainer.accuracy(data.test_images.to(device), data.test_labels.to(device));
  return result;
}

}  // namespace digits
