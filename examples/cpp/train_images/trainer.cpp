// SPDX-License-Identifier: BSD-3-Clause
#include "trainer.h"

#include <stdexcept>

namespace images {
namespace {

constexpr double kMaxLr = 0.2;
constexpr double kEmaDecay = 0.98;
constexpr double kInitScale = 1024;

torch::nn::Conv2d conv(std::int64_t before, std::int64_t after, std::int64_t size,
                       std::int64_t stride) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(before, after, size).stride(stride).padding(size / 2).bias(false));
}

torchfuse::nn::SyncBatchNorm norm_and_relu(std::int64_t channels) {
  return torchfuse::nn::SyncBatchNorm(
      torchfuse::nn::SyncBatchNormOptions(channels).fuse_relu(true));
}

/// One after another: the order of a call's arguments is open, and each draws its initial weights.
torch::nn::Sequential make_blocks() {
  torch::nn::Sequential blocks;
  blocks->push_back(Block(16, 16, 1));
  blocks->push_back(Block(16, 32, 2));
  blocks->push_back(Block(32, 64, 2));
  return blocks;
}

std::optional<torch::ScalarType> dtype_of(const std::string& precision) {
  if (precision == "fp32") return std::nullopt;
  if (precision == "bf16") return torch::kBFloat16;
  if (precision == "fp16") return torch::kHalf;
  throw std::invalid_argument("expected the precision to be fp32, bf16 or fp16, got " + precision);
}

/// The same initial weights in every process, and in the Python program.
ResNet make_net(std::int64_t classes, torch::Device device,
                const torchfuse::parallel::ProcessGroup* group) {
  torch::manual_seed(0);
  ResNet net(classes);
  net->to(device);
  if (group != nullptr) torchfuse::parallel::convert_sync_batch_norm(*net, group->name());
  return net;
}

torchfuse::amp::GradScalerOptions scaler_options(bool enabled,
                                                 const torchfuse::parallel::ProcessGroup* group) {
  torchfuse::amp::GradScalerOptions options;
  options.init_scale(kInitScale).enabled(enabled);
  if (group != nullptr) options.process_group(group->name());
  return options;
}

}  // namespace

BlockImpl::BlockImpl(std::int64_t before, std::int64_t after, std::int64_t stride)
    : conv1(register_module("conv1", conv(before, after, 3, stride))),
      norm1(register_module("norm1", norm_and_relu(after))),
      conv2(register_module("conv2", conv(after, after, 3, 1))),
      norm2(register_module("norm2", norm_and_relu(after))) {
  if (stride > 1) shortcut = register_module("shortcut", conv(before, after, 1, stride));
}

torch::Tensor BlockImpl::forward(const torch::Tensor& x) {
  const torch::Tensor around = shortcut ? shortcut(x) : x;
  return norm2(conv2(norm1(conv1(x))), around);  // adds the way around in the same pass
}

ResNetImpl::ResNetImpl(std::int64_t classes)
    : stem(register_module("stem", conv(1, 16, 3, 1))),
      norm(register_module("norm", norm_and_relu(16))),
      blocks(register_module("blocks", make_blocks())),
      head(register_module("head", torch::nn::Linear(64, classes))) {}

torch::Tensor ResNetImpl::forward(const torch::Tensor& x) {
  return head(blocks->forward(norm(stem(x))).mean({2, 3}));
}

Trainer::Trainer(const std::string& precision, torch::Device device, std::int64_t classes,
                 std::int64_t steps, const torchfuse::parallel::ProcessGroup* group)
    : device_(device),
      dtype_(dtype_of(precision)),
      group_(group),
      net_(make_net(classes, device, group)),
      optimizer_(net_->parameters(), torchfuse::optim::FusedSGDOptions(0.1)
                                         .momentum(0.9)
                                         .weight_decay(5e-4)
                                         .ema_decay(kEmaDecay)
                                         .ema_warmup(true)),
      scheduler_(optimizer_, torchfuse::optim::OneCycleLROptions(kMaxLr).total_steps(steps)),
      scaler_(device, scaler_options(dtype_ == torch::kHalf, group)) {
  if (group == nullptr) return;
  // Batch normalization's buffers are the same in all processes without being broadcast.
  model_.emplace(net_, *group,
                 torchfuse::parallel::DistributedDataParallelOptions().broadcast_buffers(false));
}

torch::Tensor Trainer::logits(const torch::Tensor& images, bool training) {
  const torch::Tensor own = images.to(device_);
  return training && model_ ? model_->forward(own) : net_->forward(own);
}

double Trainer::step(const torch::Tensor& images, const torch::Tensor& labels) {
  optimizer_.zero_grad();
  torch::Tensor loss;
  {
    const torchfuse::amp::AutocastGuard autocast(device_.type(), dtype_, dtype_.has_value());
    loss = torch::nn::functional::cross_entropy(logits(images, true), labels.to(device_));
  }
  scaler_.scale(loss).backward();
  scaler_.step(optimizer_);
  scaler_.update();
  scheduler_.step();
  const torch::Tensor total = loss.detach().clone();
  if (group_ == nullptr) return total.item<double>();
  torchfuse::all_reduce_(total, "sum", {group_->name()});
  return total.item<double>() / static_cast<double>(group_->world_size());
}

std::int64_t Trainer::correct(const torch::Tensor& images, const torch::Tensor& labels) {
  const torch::NoGradGuard no_grad;
  const torchfuse::amp::AutocastGuard autocast(device_.type(), dtype_, dtype_.has_value());
  net_->eval();
  const torch::Tensor guess = logits(images, false).argmax(1).cpu();
  net_->train();
  return (guess == labels).sum().item<std::int64_t>();
}

torchfuse::Checkpoint Trainer::checkpoint() {
  torchfuse::Checkpoint checkpoint;
  checkpoint.model(*net_).optimizer(optimizer_).scheduler(scheduler_).scaler(scaler_);
  if (group_ != nullptr) checkpoint.group(*group_);
  return checkpoint;
}

}  // namespace images
