// SPDX-License-Identifier: BSD-3-Clause
// The C++ side of tests/python/checkpoint: trains from a checkpoint to a checkpoint.
//
//   torchfuse_programs train MODE FIRST LAST IN OUT
//   torchfuse_programs train loop OUT
//
// makes the steps FIRST to LAST - 1; IN is "-" for a fresh run. MODE is fp32, or for bf16
// parameters master or remainder. Prints the samples of each step. "loop" saves until it is killed.
#include <torch/torch.h>

#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include <torchfuse/torchfuse.h>

#include "../programs.h"

namespace train_program {
namespace {

using torchfuse::Checkpoint;
using torchfuse::amp::GradScaler;
using torchfuse::amp::GradScalerOptions;
using torchfuse::optim::FusedAdam;
using torchfuse::optim::FusedAdamOptions;
using torchfuse::parallel::DistributedSampler;

struct NetImpl : torch::nn::Module {
  NetImpl()
      : fc1(register_module("fc1", torch::nn::Linear(4, 3))),
        bn(register_module("bn", torch::nn::BatchNorm1d(3))),
        fc2(register_module("fc2", torch::nn::Linear(3, 1))) {}
  torch::Tensor forward(const torch::Tensor& x) { return fc2(bn(fc1(x))); }
  torch::nn::Linear fc1{nullptr};
  torch::nn::BatchNorm1d bn{nullptr};
  torch::nn::Linear fc2{nullptr};
};
TORCH_MODULE(Net);

FusedAdamOptions options_of(const std::string& mode) {
  FusedAdamOptions options(0.05);
  options.weight_decay(0.01);
  return options.master_weights(mode != "fp32").store_param_remainders(mode == "remainder");
}

void train(const std::string& mode, int first, int last, const std::string& in,
           const std::string& out) {
  torch::manual_seed(in == "-" ? 3 : 99);
  Net model;
  const auto dtype = mode == "fp32" ? torch::kFloat32 : torch::kBFloat16;
  model->to(dtype);
  // LibTorch converts counts too, Python does not.
  auto& batches = model->bn->num_batches_tracked;
  batches.set_data(batches.to(torch::kLong));
  FusedAdam optimizer(model->parameters(), options_of(mode));
  GradScaler scaler(torch::kCPU, GradScalerOptions().init_scale(8.0).growth_interval(3));
  DistributedSampler sampler(20);
  std::int64_t drawn = 0;
  torchfuse::optim::StepLR scheduler(optimizer, 2, 0.5);
  auto checkpoint = Checkpoint().model(*model).optimizer(optimizer).scaler(scaler);
  checkpoint.scheduler(scheduler).sampler(sampler, drawn).rng();
  if (in != "-") {
    const auto values = torchfuse::load_checkpoint(in, checkpoint);
    TORCH_CHECK(values.at("step").toInt() == first, "expected the file to end before step ", first);
  } else {
    sampler.set_epoch(2);
  }
  sampler.reset();
  for (int step = first; step < last; ++step) {
    const auto samples = sampler.next(2);
    drawn += 2;
    std::cout << samples->at(0) << " " << samples->at(1) << "\n";
    optimizer.zero_grad();
    const auto loss = model(torch::randn({5, 4}).to(dtype)).pow(2).mean();
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    scaler.update();
    scheduler.step();
  }
  torchfuse::save_checkpoint(out, checkpoint.value("step", last).value("note", "C++"));
}

/// Every file holds one number in all places.
void save_forever(const std::string& out) {
  for (std::int64_t number = 1;; ++number) {
    const auto tensor = torch::full({200'000}, number, torch::kLong);
    torchfuse::save_checkpoint(out, Checkpoint().value("number", number).value("tensor", tensor));
    if (number == 1) std::cout << "ready" << std::endl;
  }
}

}  // namespace

void start(const Arguments& arguments) {
  if (arguments.size() == 2 && arguments[0] == "loop") save_forever(arguments[1]);
  TORCH_CHECK(arguments.size() == 5, "expected MODE FIRST LAST IN OUT, got ", arguments.size(),
              " arguments.");
  train(arguments[0], std::stoi(arguments[1]), std::stoi(arguments[2]), arguments[3], arguments[4]);
}

}  // namespace train_program
