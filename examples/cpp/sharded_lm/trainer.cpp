// SPDX-License-Identifier: BSD-3-Clause
#include "trainer.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numbers>
#include <optional>

namespace lm {
namespace {

using torchfuse::optim::FusedAdamOptions;
using torchfuse::parallel::ProcessGroup;

constexpr std::uint64_t kSeed = 0;

torch::Device device_of(const ProcessGroup& group) {
  return group.backend() == "nccl" ? torch::Device(torch::kCUDA, group.local_rank())
                                   : torch::Device(torch::kCPU);
}

/// On its device and in its dtype before it is wrapped.
LanguageModel make_net(const Options& options, torch::Device device) {
  torch::manual_seed(kSeed);
  LanguageModel net(kVocabulary, options.sequence, options.width, options.layers, options.heads);
  net->to(device, options.precision == "bf16" ? torch::kBFloat16 : torch::kFloat);
  return net;
}

FusedAdamOptions adam(const Options& options) {
  FusedAdamOptions adam(options.lr);
  adam.betas({0.9, 0.95}).weight_decay(0.1).max_grad_norm(1.0);
  // The masters that a bf16 model needs, in 16 bits for each parameter instead of 32.
  if (options.precision == "bf16") adam.master_weights(true).store_param_remainders(true);
  return adam;
}

/// Rises in a line, then falls to a tenth in half a cosine.
std::function<double(std::int64_t)> warm_up_and_cosine(const Options& options) {
  const auto warm_up = static_cast<double>(options.warm_up);
  const double falling = std::max(1.0, static_cast<double>(options.steps) - warm_up);
  return [=](std::int64_t step) {
    const auto now = static_cast<double>(step);
    if (now < warm_up) return (now + 1) / warm_up;
    const double done = std::min(1.0, (now - warm_up) / falling);
    return 0.1 + 0.45 * (1 + std::cos(std::numbers::pi * done));
  };
}

/// Refuses a checkpoint of another model before anything is read from it. Shapes would not tell
/// another number of heads, and dtypes are converted.
torchfuse::CheckpointPart same_model(const std::string& model) {
  return {[model]() -> c10::IValue { return model; },
          [model](const c10::IValue& saved) -> std::function<void()> {
            TORCH_CHECK_VALUE(saved.isString() && saved.toStringRef() == model,
                              "expected --resume with the model of the checkpoint, ", saved,
                              ", got ", model);
            return [] {};
          }};
}

/// Mean cross entropy in nats per token, in fp32.
torch::Tensor loss_of(const torch::Tensor& logits, const torch::Tensor& following) {
  return torchfuse::softmax_cross_entropy(logits.flatten(0, 1), following.flatten(),
                                          /*smoothing=*/0.0, /*ignore_index=*/std::nullopt,
                                          torch::kFloat)
      .mean();
}

}  // namespace

Trainer::Trainer(const Options& options, const ProcessGroup& group)
    : group_(group),
      device_(device_of(group)),
      accumulate_(options.accumulate),
      net_(make_net(options, device_)),
      model_(net_, group),
      optimizer_(net_->parameters(), adam(options), group),
      schedule_(optimizer_, warm_up_and_cosine(options)) {
  checkpoint_.part("options", same_model(options.model()));
  checkpoint_.model(*net_).optimizer(optimizer_).scheduler(schedule_).group(group);
}

Measured Trainer::step(const Batch& batch) {
  const Batch own = part_of(batch);
  torch::Tensor total = torch::zeros({}, device_);
  for (std::int64_t part = 0; part < accumulate_; ++part) {
    // Gradients are reduced once a step, with the last part.
    const auto local = model_.no_sync(part + 1 < accumulate_);
    const torch::Tensor logits = model_.forward(own.tokens.chunk(accumulate_)[part]);
    const torch::Tensor loss =
        loss_of(logits, own.following.chunk(accumulate_)[part]) / accumulate_;
    loss.backward();
    total += loss.detach();
  }
  optimizer_.step();  // clips, updates this rank's part, and gathers the new parameters
  optimizer_.zero_grad();
  const double lr = schedule_.get_last_lr()[0];
  schedule_.step();
  return {mean(total), lr, optimizer_.grad_norm().item<double>()};
}

double Trainer::validation_loss(const Batch& batch) {
  const torch::NoGradGuard no_grad;
  const Batch own = part_of(batch);
  return mean(loss_of(net_->forward(own.tokens), own.following));
}

std::int64_t Trainer::load(const std::string& path) {
  torchfuse::load_checkpoint(path, checkpoint_);
  return schedule_.last_epoch();
}

bool Trainer::agree(bool found) const {
  const double share = mean(torch::full({}, found ? 1.0 : 0.0, device_));
  TORCH_CHECK_VALUE(share == 0 || share == 1, "expected --out to be one folder for all ",
                    group_.world_size(), " processes, got a checkpoint in only some of them");
  return share == 1;
}

std::string Trainer::layout() const {
  const std::int64_t processes = group_.world_size();
  return processes == 1 ? "1 process" : "ZeRO of " + std::to_string(processes);
}

Batch Trainer::part_of(const Batch& batch) const {
  const auto part = [this](const torch::Tensor& all) {
    return all.chunk(group_.world_size())[group_.rank()].to(device_);
  };
  return {part(batch.tokens), part(batch.following)};
}

double Trainer::mean(const torch::Tensor& value) const {
  const torch::Tensor total = value.clone();
  torchfuse::all_reduce_(total, "sum", {group_.name()});
  return total.item<double>() / static_cast<double>(group_.world_size());
}

}  // namespace lm
