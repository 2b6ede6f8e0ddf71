// SPDX-License-Identifier: BSD-3-Clause
// Steps of a ShardedOptimizer in several processes, started by tests/python/parallel, which
// computes the same in Python:
//
//   torchfuse_programs sharded FIRST LAST FOLDER
//
// resumes from FOLDER/step<FIRST>.pt, unless FIRST is 0, and writes FOLDER/step<LAST>.pt.
#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "../programs.h"

namespace sharded_program {
namespace {

using torchfuse::optim::FusedAdam;
using torchfuse::optim::FusedAdamOptions;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    const std::vector<std::vector<std::int64_t>> sizes{{7, 5}, {3}, {64, 33},
                                                       {1},    {},  {4, 3, 3, 3}};
    for (const auto& each : sizes) {
      const auto index = static_cast<double>(params.size());
      torch::Tensor value = wave(each, index).to(torch::kBFloat16);
      if (each.size() == 4) value = value.contiguous(torch::MemoryFormat::ChannelsLast);
      params.push_back(register_parameter("p" + std::to_string(params.size()), value));
    }
  }
  void set_grads(int step) {
    for (std::size_t index = 0; index < params.size(); ++index) {
      const double shift = 10.0 * (step + 1) + static_cast<double>(index);
      const torch::Tensor value = params[index].detach();
      params[index].mutable_grad() = torch::empty_like(value).copy_(wave(value.sizes(), shift));
    }
  }
  std::vector<torch::Tensor> params;
};

torchfuse::parallel::ProcessGroup join() {
  return torchfuse::parallel::init_process_group(
      torchfuse::parallel::ProcessGroupOptions().backend("gloo").leave_timeout(
          std::chrono::seconds(5)));
}

}  // namespace

void start(const Arguments& arguments) {
  torch::set_num_threads(1);
  const int first = std::stoi(arguments.at(0));
  const int last = std::stoi(arguments.at(1));
  const auto file = [&](int step) {
    return arguments.at(2) + "/step" + std::to_string(step) + ".pt";
  };
  const auto group = join();
  NetImpl net;
  torchfuse::parallel::ShardedOptimizer<FusedAdam> optimizer(
      net.params, FusedAdamOptions(0.01).weight_decay(0.1).master_weights(true).ema_decay(0.9),
      group);
  auto checkpoint = torchfuse::Checkpoint().model(net).optimizer(optimizer).group(group);
  if (first > 0) torchfuse::load_checkpoint(file(first), checkpoint);
  for (int step = first; step < last; ++step) {
    net.set_grads(step);
    optimizer.step();
  }
  torchfuse::save_checkpoint(file(last), checkpoint);
}

}  // namespace sharded_program
