// SPDX-License-Identifier: BSD-3-Clause
#include "distributed_trainer.h"

#include <stdexcept>

namespace digits {
namespace {

constexpr double kLearningRate = 1e-3;
constexpr double kWeightDecay = 0.01;
// Far below the default of 2,000, so that the scale also grows within the few hundred steps here.
constexpr std::int64_t kGrowthInterval = 60;
constexpr std::uint64_t kSeed = 0;

torch::nn::Conv2d conv(std::int64_t in, std::int64_t out) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1).bias(false));
}

torchfuse::nn::SyncBatchNorm norm(std::int64_t channels) {
  return torchfuse::nn::SyncBatchNorm(
      torchfuse::nn::SyncBatchNormOptions(channels).fuse_relu(true));
}

std::optional<torch::ScalarType> dtype_of(const std::string& precision) {
  if (precision == "fp32") return std::nullopt;
  if (precision == "bf16") return torch::kBFloat16;
  if (precision == "fp16") return torch::kHalf;
  throw std::invalid_argument("expected the precision to be fp32, bf16 or fp16, got " + precision);
}

/// The same initial weights in every process, and in the Python program.
Net make_net(torch::Device device, const std::string& group) {
  torch::manual_seed(kSeed);
  Net net;
  net->to(device);
  torchfuse::parallel::convert_sync_batch_norm(*net, group);
  return net;
}

/// Batch normalization's buffers are the same in all processes without being broadcast.
torchfuse::parallel::DistributedDataParallelOptions without_buffers() {
  return torchfuse::parallel::DistributedDataParallelOptions().broadcast_buffers(false);
}

}  // namespace

NetImpl::NetImpl()
    : conv1(register_module("conv1", conv(1, 16))),
      norm1(register_module("norm1", norm(16))),
      conv2(register_module("conv2", conv(16, 32))),
      norm2(register_module("norm2", norm(32))),
      hidden(register_module("hidden", torch::nn::Linear(512, 64))),
      output(register_module("output", torch::nn::Linear(64, 10))) {}

torch::Tensor NetImpl::forward(torch::Tensor x) {
  x = norm2(conv2(norm1(conv1(x))));
  x = torch::max_pool2d(x, 2).flatten(1);
  return output(torch::relu(hidden(x)));
}

DistributedTrainer::DistributedTrainer(const std::string& precision, torch::Device device,
                                       const torchfuse::parallel::ProcessGroup& group)
    : device_(device),
      dtype_(dtype_of(precision)),
      group_(group.name()),
      world_size_(group.world_size()),
      net_(make_net(device, group_)),
      model_(net_, group, without_buffers()),
      optimizer_(net_->parameters(),
                 torchfuse::optim::FusedAdamOptions(kLearningRate).weight_decay(kWeightDecay)),
      scaler_(device, torchfuse::amp::GradScalerOptions()
                          .growth_interval(kGrowthInterval)
                          .process_group(group_)
                          .enabled(dtype_ == torch::kHalf)) {}

torch::Tensor DistributedTrainer::step(const torch::Tensor& images, const torch::Tensor& labels) {
  optimizer_.zero_grad();
  torch::Tensor logits;
  {
    const torchfuse::amp::AutocastGuard autocast(device_.type(), dtype_, dtype_.has_value());
    logits = model_.forward(images.to(device_));
  }
  const torch::Tensor loss =
      torch::nn::functional::cross_entropy(logits.to(torch::kFloat), labels.to(device_));
  scaler_.scale(loss).backward();
  scaler_.step(optimizer_);
  scaler_.update();
  const torch::Tensor total = loss.detach().clone();
  torchfuse::all_reduce_(total, "sum", {group_});
  return total / world_size_;
}

double DistributedTrainer::accuracy(const torch::Tensor& images, const torch::Tensor& labels) {
  const torch::NoGradGuard no_grad;
  net_->eval();
  const torch::Tensor predicted = net_->forward(images.to(device_)).argmax(1).cpu();
  net_->train();
  return (predicted == labels).to(torch::kDouble).mean().item<double>();
}

void DistributedTrainer::save(const std::filesystem::path& path, std::int64_t epoch) {
  torch::serialize::OutputArchive archive;
  torch::serialize::OutputArchive model;
  torch::serialize::OutputArchive optimizer;
  torch::serialize::OutputArchive scaler;
  net_->save(model);
  optimizer_.save(optimizer);
  scaler_.save(scaler);
  archive.write("epoch", torch::tensor(epoch));
  archive.write("model", model);
  archive.write("optimizer", optimizer);
  if (scaler_.is_enabled()) archive.write("scaler", scaler);
  std::filesystem::path part = path;
  part += ".part";
  archive.save_to(part);
  std::filesystem::rename(part, path);
}

std::int64_t DistributedTrainer::load(const std::filesystem::path& path) {
  torch::serialize::InputArchive archive;
  torch::serialize::InputArchive part;
  archive.load_from(path, device_);
  torch::Tensor epoch;
  archive.read("epoch", epoch);
  archive.read("model", part);
  net_->load(part);
  archive.read("optimizer", part);
  optimizer_.load(part);
  if (scaler_.is_enabled()) {
    archive.read("scaler", part);
    scaler_.load(part);
  }
  return epoch.item<std::int64_t>();
}

}  // namespace digits
