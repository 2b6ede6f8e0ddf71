// SPDX-License-Identifier: BSD-3-Clause
// Trains a network with batch normalization on handwritten digits in several processes:
//
//   torchrun --no-python --nproc-per-node 2 ./distributed_digits <data> <out>
//       [--precision bf16] [--epochs 8] [--batch 64] [--backend nccl] [--resume]
//
// The losses are those of examples/python/distributed_digits.py, which describes the program.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "data.h"
#include "distributed_trainer.h"
#include "measure.h"

namespace {

using torchfuse::parallel::DistributedSampler;
using torchfuse::parallel::DistributedSamplerOptions;

constexpr double kMinAccuracy = 0.97;
constexpr std::int64_t kEpochs = 8;

struct Arguments {
  std::filesystem::path data;
  std::filesystem::path out;
  std::string backend = "gloo";
  std::string precision = "fp32";
  std::int64_t epochs = kEpochs;
  std::int64_t batch = 64;  ///< samples of all processes together
  bool resume = false;
};

Arguments parse(const std::vector<std::string>& words) {
  if (words.size() < 2)
    throw std::invalid_argument("expected two folders: of the data, for the results");
  Arguments arguments;
  arguments.data = words[0];
  arguments.out = words[1];
  for (std::size_t i = 2; i < words.size(); ++i) {
    if (words[i] == "--resume") {
      arguments.resume = true;
      continue;
    }
    if (i + 1 == words.size()) throw std::invalid_argument("expected a value behind " + words[i]);
    const std::string& value = words[++i];
    if (words[i - 1] == "--backend") {
      arguments.backend = value;
    } else if (words[i - 1] == "--precision") {
      arguments.precision = value;
    } else if (words[i - 1] == "--epochs") {
      arguments.epochs = std::stoll(value);
    } else if (words[i - 1] == "--batch") {
      arguments.batch = std::stoll(value);
    } else {
      throw std::invalid_argument("unknown argument " + words[i - 1]);
    }
  }
  return arguments;
}

struct Outcome {
  std::vector<torch::Tensor> losses;
  double accuracy = 0.0;
};

Outcome train(const Arguments& arguments, const torchfuse::parallel::ProcessGroup& group) {
  const digits::Digits data = digits::load_digits(arguments.data);
  const torch::Device device = arguments.backend == "nccl"
                                   ? torch::Device(torch::kCUDA, group.local_rank())
                                   : torch::Device(torch::kCPU);
  digits::DistributedTrainer trainer(arguments.precision, device, group);
  DistributedSampler sampler(data.train_labels.size(0), DistributedSamplerOptions()
                                                            .num_replicas(group.world_size())
                                                            .rank(group.rank())
                                                            .drop_last(true));
  const std::int64_t per_process = arguments.batch / group.world_size();
  const auto steps = static_cast<std::int64_t>(sampler.size()) / per_process;
  const std::filesystem::path checkpoint = arguments.out / "checkpoint_cpp.pt";
  const std::int64_t begin = arguments.resume ? trainer.load(checkpoint) : 0;
  const bool first = group.rank() == 0;
  std::optional<digits::ProgressBar> bar;
  if (first) bar.emplace(arguments.precision, (arguments.epochs - begin) * steps);

  Outcome outcome;
  for (std::int64_t epoch = begin; epoch < arguments.epochs; ++epoch) {
    sampler.set_epoch(epoch);
    sampler.reset();
    for (std::int64_t step = 0; step < steps; ++step) {
      const auto indices = *sampler.next(per_process);
      const torch::Tensor chosen =
          torch::tensor(std::vector<std::int64_t>(indices.begin(), indices.end()));
      outcome.losses.push_back(trainer.step(data.train_images.index_select(0, chosen),
                                            data.train_labels.index_select(0, chosen)));
      if (bar) bar->advance();
    }
    if (first) trainer.save(checkpoint, epoch + 1);
  }
  if (bar) bar->finish();
  outcome.accuracy = trainer.accuracy(data.test_images, data.test_labels);
  return outcome;
}

/// The losses as a JSON list, as the Python program writes them.
void write_losses(const std::vector<torch::Tensor>& losses, const std::filesystem::path& path) {
  std::ofstream file(path);
  file.precision(17);
  for (std::size_t i = 0; i < losses.size(); ++i) {
    file << (i == 0 ? "[" : ", ") << losses[i].item<double>();
  }
  file << "]\n";
}

int run(const Arguments& arguments) {
  const auto group = torchfuse::parallel::init_process_group(
      torchfuse::parallel::ProcessGroupOptions().backend(arguments.backend));
  if (arguments.batch % group.world_size() != 0) {
    throw std::invalid_argument("expected --batch to be a multiple of the processes");
  }
  std::filesystem::create_directories(arguments.out);
  const Outcome outcome = train(arguments, group);
  if (group.rank() == 0) {
    write_losses(outcome.losses, arguments.out / "losses_cpp.json");
    std::cout << "test accuracy: " << std::round(outcome.accuracy * 10000) / 100 << "%\n";
  }
  return arguments.epochs >= kEpochs && outcome.accuracy < kMinAccuracy ? EXIT_FAILURE
                                                                        : EXIT_SUCCESS;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(parse(std::vector<std::string>(argv + 1, argv + argc)));
  } catch (const c10::Error& error) {
    std::cerr << "distributed_digits: " << error.what_without_backtrace() << '\n';
  } catch (const std::exception& error) {
    std::cerr << "distributed_digits: " << error.what() << '\n';
  }
  return EXIT_FAILURE;
}
