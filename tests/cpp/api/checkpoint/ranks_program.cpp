// SPDX-License-Identifier: BSD-3-Clause
// Saves and loads a checkpoint in several processes, started by tests/python/checkpoint:
//
//   torchfuse_programs ranks FOLDER
//
// writes what each process found to FOLDER/rank<rank>.txt.
#include <torch/torch.h>
#include <torchfuse/checkpoint.h>
#include <torchfuse/parallel/process_group.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>

#include "../programs.h"

namespace ranks_program {
namespace {

using torchfuse::Checkpoint;
using torchfuse::parallel::ProcessGroup;
using torchfuse::parallel::ProcessGroupOptions;

torch::nn::Linear filled(std::int64_t inputs, double value) {
  const torch::NoGradGuard no_grad;
  torch::nn::Linear model(inputs, 2);
  for (torch::Tensor& param : model->parameters()) param.fill_(value);
  return model;
}

std::string refusal_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "none";
}

}  // namespace

void start(const Arguments& arguments) {
  const std::string& folder = arguments.at(0);
  const ProcessGroup group = torchfuse::parallel::init_process_group(
      ProcessGroupOptions().backend("gloo").leave_timeout(std::chrono::seconds(1)));
  const auto rank = group.rank();
  std::ofstream found(folder + "/rank" + std::to_string(rank) + ".txt");
  const std::string path = folder + "/last.pt";
  // Rank 0's weights are saved, and the generators of all.
  torch::manual_seed(static_cast<std::uint64_t>(10 + rank));
  torch::nn::Linear model = filled(2, 1.0 + static_cast<double>(rank));
  auto checkpoint = Checkpoint().model(*model).rng().value("epoch", 3).group(group);
  torchfuse::save_checkpoint(path, checkpoint);
  const torch::Tensor drawn = torch::rand(4);
  const auto values = torchfuse::load_checkpoint(path, checkpoint);
  found << "epoch " << values.at("epoch").toInt() << '\n';
  found << "weight " << model->weight[0][0].item<double>() << '\n';
  found << "drawn " << drawn[0].item<double>() << '\n';
  found << "draws again " << torch::equal(torch::rand(4), drawn) << '\n';
  // What rank 0 cannot write is refused in all ranks.
  const auto save_nowhere = [&] {
    torchfuse::save_checkpoint(folder + "/none/last.pt", checkpoint);
  };
  found << "save: " << refusal_of(save_nowhere) << '\n';
  // What does not fit in the last rank is loaded by none.
  const bool last = rank + 1 == group.world_size();
  torch::nn::Linear other = filled(last ? 3 : 2, 7.0);
  auto misfit = Checkpoint().model(*other).group(group);
  found << "load: " << refusal_of([&] { torchfuse::load_checkpoint(path, misfit); }) << '\n';
  found << "kept " << other->weight[0][0].item<double>() << '\n';
  torchfuse::save_checkpoint(path, checkpoint.value("epoch", 4));
  found << "then " << torchfuse::load_checkpoint(path, checkpoint).at("epoch").toInt()
        << std::endl;  // also to the file
  // Rank 0 alone: the others have ended.
  if (rank != 0) std::_Exit(0);
  const auto save = [&] { torchfuse::save_checkpoint(path, checkpoint); };
  found << "alone: " << refusal_of(save) << '\n';
}

}  // namespace ranks_program
