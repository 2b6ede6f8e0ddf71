// SPDX-License-Identifier: BSD-3-Clause
// Everything around a model: data parallelism, fp16 with a gradient scaler, accumulation, clipping,
// a learning-rate schedule, averaged weights, evaluation, and one checkpoint to resume from.
//
//   torchrun --no-python --nproc-per-node 2 ./whole_trainer <checkpoint> <steps>
//
// A run that ended after any step goes on where it was: start it again with more steps.
#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

namespace {

using torchfuse::amp::AutocastGuard;
using torchfuse::parallel::DistributedSamplerOptions;

constexpr std::int64_t kAllSteps = 60;  // the schedule's length
constexpr std::int64_t kBatch = 32;     // of one part, of all processes together
constexpr std::int64_t kParts = 2;      // parts of a step, whose gradients add up
constexpr std::int64_t kSamples = 960;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(torch::Device device)
      : layers(register_module(
            "layers", torch::nn::Sequential(torch::nn::Linear(16, 32), torch::nn::ReLU(),
                                            torch::nn::Dropout(0.1), torch::nn::Linear(32, 2)))) {
    to(device);  // before it is wrapped
  }
  torch::Tensor forward(const torch::Tensor& x) { return layers->forward(x); }

  torch::nn::Sequential layers;
};
TORCH_MODULE(Net);

class Trainer {
 public:
  Trainer(const torchfuse::parallel::ProcessGroup& group, torch::Device device)
      : group_(group), net_(device), scaler_(device) {
    points_ = torch::randn({kSamples, 16}).to(device);
    labels_ = (points_.sum(1) > 0).to(torch::kLong);
    torch::manual_seed(1 + group.rank());  // another dropout in each
    checkpoint_.model(*net_).optimizer(optimizer_).scaler(scaler_).scheduler(schedule_);
    checkpoint_.sampler(sampler_, drawn_).rng().group(group_);
  }

  void train(const std::string& path, std::int64_t last) {
    std::int64_t step = 0;
    if (std::ifstream(path).good()) {
      step = torchfuse::load_checkpoint(path, checkpoint_).at("step").toInt();
    }
    sampler_.reset();
    while (step < last) {
      const double loss = take_step();
      ++step;
      if (step % 20 == 0 || step == last) {
        torchfuse::save_checkpoint(path, checkpoint_.value("step", step));
      }
      if (group_.rank() != 0) continue;
      std::cout << "step " << step << ": loss " << loss << ", rate " << schedule_.get_last_lr()[0]
                << '\n';
    }
  }

  /// The fraction of points that the averaged weights label as they should be.
  double accuracy() {
    const torchfuse::optim::EmaWeights averages(optimizer_);  // until the end of the scope
    const torch::NoGradGuard no_grad;
    const AutocastGuard autocast(points_.device().type(), torch::kHalf);
    net_->eval();
    const torch::Tensor guess = net_->forward(points_).argmax(1);
    net_->train();
    return (guess == labels_).to(torch::kDouble).mean().item<double>();
  }

 private:
  /// One step; returns the loss of all processes.
  double take_step() {
    optimizer_.zero_grad();
    torch::Tensor total = torch::zeros({}, points_.options());
    for (std::int64_t part = 0; part < kParts; ++part) {
      const auto local = model_.no_sync(part + 1 < kParts);  // the last part averages the sums
      const torch::Tensor chosen = next_samples();
      torch::Tensor loss;
      {
        const AutocastGuard autocast(chosen.device().type(), torch::kHalf);
        const torch::Tensor guess = model_.forward(points_.index_select(0, chosen));
        loss = torch::cross_entropy_loss(guess, labels_.index_select(0, chosen)) / kParts;
      }
      scaler_.scale(loss).backward();
      total += loss.detach();
    }
    scaler_.step(optimizer_);  // checks, unscales, clips, updates and averages the weights
    scaler_.update();
    schedule_.step();
    torchfuse::all_reduce_(total, "sum", {group_.name()});
    return total.item<double>() / static_cast<double>(group_.world_size());
  }

  torch::Tensor next_samples() {
    const std::int64_t own = kBatch / group_.world_size();
    if (drawn_ + own > static_cast<std::int64_t>(sampler_.size())) {
      sampler_.set_epoch(sampler_.epoch() + 1);
      sampler_.reset();
      drawn_ = 0;
    }
    const auto indices = sampler_.next(own).value();
    drawn_ += own;
    return torch::tensor(std::vector<std::int64_t>(indices.begin(), indices.end()))
        .to(points_.device());
  }

  const torchfuse::parallel::ProcessGroup& group_;
  Net net_;
  torchfuse::parallel::DistributedDataParallel<NetImpl> model_{net_, group_};
  torchfuse::optim::FusedAdam optimizer_{
      net_->parameters(),  // weight_decay is 0 by default; torch's AdamW has 0.01
      torchfuse::optim::FusedAdamOptions(1e-3).max_grad_norm(1.0).ema_decay(0.9)};
  torchfuse::amp::GradScaler scaler_;
  torchfuse::optim::OneCycleLR schedule_{
      optimizer_, torchfuse::optim::OneCycleLROptions(2e-2).total_steps(kAllSteps + 1)};
  torchfuse::parallel::DistributedSampler sampler_{
      kSamples, DistributedSamplerOptions().num_replicas(group_.world_size()).rank(group_.rank())};
  std::int64_t drawn_ = 0;  // samples of this epoch
  torch::Tensor points_, labels_;
  torchfuse::Checkpoint checkpoint_;
};

}  // namespace

int main(int argc, char** argv) try {
  TORCH_CHECK(argc == 3, "usage: whole_trainer <checkpoint> <steps>");
  const auto group = torchfuse::parallel::init_process_group();
  const bool on_gpu = group.backend() == "nccl";
  torch::manual_seed(0);  // the same weights and points in all processes
  Trainer trainer(group, on_gpu ? torch::Device(torch::kCUDA, group.local_rank()) : torch::kCPU);
  trainer.train(argv[1], std::atol(argv[2]));
  if (group.rank() == 0) std::cout << "accuracy " << trainer.accuracy() << '\n';
  return EXIT_SUCCESS;
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << '\n';
  return EXIT_FAILURE;
}
