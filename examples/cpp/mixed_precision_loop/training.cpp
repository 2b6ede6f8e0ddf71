// SPDX-License-Identifier: BSD-3-Clause
#include "training.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>

#include "../train_digits/measure.h"

namespace tutorial {
namespace {

constexpr std::int64_t kBatchSize = 64;
constexpr std::int64_t kWarmUpSteps = 20;
constexpr double kPeakLearningRate = 4e-3;
constexpr double kWeightDecay = 0.01;
constexpr double kMaxGradNorm = 1.0;
// Far below the default of 2,000, so that the scale also grows within a few hundred steps.
constexpr std::int64_t kGrowthInterval = 50;

torch::nn::Sequential make_model(torch::Device device) {
  using torch::nn::Linear;
  using torch::nn::ReLU;
  torch::manual_seed(0);
  torch::nn::Sequential model(torch::nn::Flatten(), Linear(64, 128), ReLU(), Linear(128, 128),
                              ReLU(), Linear(128, 10));
  model->to(device);
  return model;
}

torch::serialize::OutputArchive archive_of(const auto& part) {
  torch::serialize::OutputArchive archive;
  part.save(archive);
  return archive;
}

void load_part(torch::serialize::InputArchive& archive, const std::string& name, auto& part) {
  torch::serialize::InputArchive inner;
  archive.read(name, inner);
  part.load(inner);
}

torch::Tensor read_tensor(torch::serialize::InputArchive& archive, const std::string& name) {
  torch::Tensor tensor;
  archive.read(name, tensor, /*is_buffer=*/true);
  return tensor;
}

std::vector<double> to_vector(const torch::Tensor& tensor) {
  const torch::Tensor values = tensor.to(torch::kDouble).contiguous();
  return {values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel()};
}

}  // namespace

Training::Training(torch::Device device, std::int64_t total_steps)
    : device_(device),
      total_steps_(total_steps),
      model_(make_model(device)),
      optimizer_(model_->parameters(),
                 torchfuse::optim::FusedAdamOptions(kPeakLearningRate).weight_decay(kWeightDecay)),
      scaler_(device, torchfuse::amp::GradScalerOptions().growth_interval(kGrowthInterval)),
      order_(at::detail::createCPUGenerator(0)) {}

torch::Tensor Training::step(const torch::Tensor& images, const torch::Tensor& labels) {
  optimizer_.zero_grad();
  torch::Tensor loss;
  {
    const torchfuse::amp::AutocastGuard autocast(device_.type(), torch::kHalf);
    loss = torch::nn::functional::cross_entropy(model_->forward(images), labels);
  }
  scaler_.scale(loss).backward();
  scaler_.unscale_(optimizer_);
  torchfuse::clip_grad_norm_(model_->parameters(), kMaxGradNorm);
  scaler_.step(optimizer_);
  scaler_.update();
  return loss;
}

// Rises in a few steps, then falls to zero at the end. Computed from the number of steps so far, so
// a checkpoint need not store it.
double Training::learning_rate() const {
  const auto done = static_cast<double>(losses_.size());
  const double up = (done + 1.0) / kWarmUpSteps;
  const double down = 1.0 - done / static_cast<double>(total_steps_);
  return kPeakLearningRate * std::min(up, down);
}

void Training::run(const digits::Digits& data, std::int64_t steps, const std::string& name) {
  digits::ProgressBar progress(name, steps);
  for (std::int64_t i = 0; i < steps; ++i) {
    for (auto& group : optimizer_.param_groups()) group.options().set_lr(learning_rate());
    const torch::Tensor batch =
        torch::randint(data.train_labels.size(0), {kBatchSize}, order_, torch::kLong).to(device_);
    const torch::Tensor loss =
        step(data.train_images.index_select(0, batch), data.train_labels.index_select(0, batch));
    // For the table. A faster program reads neither of them in every step.
    losses_.push_back(loss.item<double>());
    scales_.push_back(scaler_.get_scale());
    progress.advance();
  }
  progress.finish();
}

void Training::save(const std::filesystem::path& path) const {
  torch::serialize::OutputArchive archive;
  torch::serialize::OutputArchive model = archive_of(*model_);
  torch::serialize::OutputArchive optimizer = archive_of(optimizer_);
  torch::serialize::OutputArchive scaler = archive_of(scaler_);
  archive.write("model", model);
  archive.write("optimizer", optimizer);
  archive.write("scaler", scaler);
  archive.write("order", order_.get_state(), /*is_buffer=*/true);
  archive.write("losses", torch::tensor(losses_, torch::kDouble), /*is_buffer=*/true);
  archive.write("scales", torch::tensor(scales_, torch::kDouble), /*is_buffer=*/true);
  archive.save_to(path.string());
}

void Training::load(const std::filesystem::path& path) {
  torch::serialize::InputArchive archive;
  archive.load_from(path.string(), device_);
  load_part(archive, "model", *model_);
  load_part(archive, "optimizer", optimizer_);
  load_part(archive, "scaler", scaler_);
  order_.set_state(read_tensor(archive, "order").cpu());
  losses_ = to_vector(read_tensor(archive, "losses").cpu());
  scales_ = to_vector(read_tensor(archive, "scales").cpu());
}

double Training::accuracy(const digits::Digits& data) {
  const torch::NoGradGuard no_grad;
  const torch::Tensor predicted = model_->forward(data.test_images).argmax(1);
  return (predicted == data.test_labels).to(torch::kDouble).mean().item<double>();
}

torch::Tensor Training::weights() const {
  std::vector<torch::Tensor> rows;
  for (const torch::Tensor& parameter : model_->parameters()) {
    rows.push_back(parameter.detach().flatten());
  }
  return torch::cat(rows);
}

}  // namespace tutorial
