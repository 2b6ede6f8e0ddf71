// SPDX-License-Identifier: BSD-3-Clause
// Trains a residual network on image files, alone or in several processes:
//
//   ./train_images <data> <out> [--name NAME] [--precision bf16] [--epochs 8] [--stop-after 4]
//       [--workers 2] [--device cuda] [--resume]
//   torchrun --no-python --nproc-per-node 2 ./train_images <data> <out>
//
// examples/python/train_images.py describes the program; losses, checkpoint, weights and result
// file are the same. It draws no picture: image_report.py does.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "image_folder.h"
#include "measure.h"
#include "run.h"
#include "trainer.h"

namespace {

using images::ImageFolder;
using images::Trainer;
using torch::data::transforms::Stack;
using torchfuse::parallel::DistributedSampler;
using torchfuse::parallel::DistributedSamplerOptions;
using torchfuse::parallel::ProcessGroup;

constexpr std::size_t kBatch = 64;  // images of all processes together
constexpr std::uint64_t kSeed = 0;

struct Arguments {
  std::string data;
  std::string out;
  std::string name;
  std::string precision = "fp32";
  std::string device = torch::cuda::is_available() ? "cuda" : "cpu";
  std::int64_t epochs = 8;
  std::int64_t stop_after = 0;  // 0: epochs
  std::size_t workers = 2;      // threads that load images
  bool resume = false;
};

Arguments parse(const std::vector<std::string>& words) {
  if (words.size() < 2) {
    throw std::invalid_argument("expected two folders: of the images, for the results");
  }
  Arguments arguments;
  arguments.data = words[0];
  arguments.out = words[1];
  for (std::size_t i = 2; i < words.size(); ++i) {
    if (words[i] == "--resume") {
      arguments.resume = true;
      continue;
    }
    if (i + 1 == words.size()) throw std::invalid_argument("expected a value behind " + words[i]);
    const std::string& option = words[i];
    const std::string& value = words[++i];
    if (option == "--name") {
      arguments.name = value;
    } else if (option == "--precision") {
      arguments.precision = value;
    } else if (option == "--device") {
      arguments.device = value;
    } else if (option == "--epochs") {
      arguments.epochs = std::stoll(value);
    } else if (option == "--stop-after") {
      arguments.stop_after = std::stoll(value);
    } else if (option == "--workers") {
      arguments.workers = std::stoul(value);
    } else {
      throw std::invalid_argument("unknown argument " + option);
    }
  }
  if (arguments.name.empty()) {
    arguments.name = "cpp-" + arguments.device + "-" + arguments.precision;
  }
  return arguments;
}

/// Share of images that the averaged weights label correctly.
template <typename Loader>
double accuracy(Trainer& trainer, Loader& loader) {
  const auto averages = trainer.averages();
  std::int64_t correct = 0;
  std::int64_t total = 0;
  for (const auto& batch : loader) {
    correct += trainer.correct(batch.data, batch.target);
    total += batch.target.size(0);
  }
  return static_cast<double>(correct) / static_cast<double>(total);
}

std::vector<double> numbers(const c10::IValue& list) {
  std::vector<double> result;
  for (const c10::IValue& number : list.toListRef()) result.push_back(number.toDouble());
  return result;
}

/// Loads a checkpoint and what the run had measured; returns the number of epochs.
std::int64_t resume(const std::string& path, const torchfuse::Checkpoint& checkpoint,
                    images::Run& run) {
  const auto values = torchfuse::load_checkpoint(path, checkpoint);
  run.losses = numbers(values.at("losses"));
  run.accuracies = numbers(values.at("accuracies"));
  run.step_seconds = numbers(values.at("step_seconds"));
  return values.at("epoch").toInt();
}

/// Writes the result file and the averaged weights.
void report(const images::Run& run, Trainer& trainer, const std::string& stem) {
  run.write(stem + ".json");
  const auto averages = trainer.averages();
  torchfuse::save_weights(stem + ".safetensors", *trainer.net());
  std::cout << "accuracy of the averaged weights: " << 100 * run.accuracies.back() << "%, in "
            << stem << ".json\n";
}

void train(const Arguments& arguments, const ProcessGroup* group) {
  const std::int64_t ranks = group != nullptr ? group->world_size() : 1;
  if (kBatch % static_cast<std::size_t>(ranks) != 0) {
    throw std::invalid_argument("expected a number of processes that divides the batch");
  }
  std::filesystem::create_directories(arguments.out);
  const std::int64_t rank = group != nullptr ? group->rank() : 0;
  const std::size_t own_batch = kBatch / static_cast<std::size_t>(ranks);
  torch::Device device(arguments.device);
  if (device.is_cuda() && group != nullptr) device.set_index(group->local_rank());
  ImageFolder images(arguments.data + "/train", kSeed);
  DistributedSampler sampler(
      images.size().value(),
      DistributedSamplerOptions().num_replicas(ranks).rank(rank).drop_last(true));
  const auto options = torch::data::DataLoaderOptions().workers(arguments.workers);
  const auto loader = torch::data::make_data_loader(
      images.map(Stack<>()), sampler,
      torch::data::DataLoaderOptions(options).batch_size(own_batch).drop_last(true));
  const auto test_loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
      ImageFolder(arguments.data + "/test").map(Stack<>()),
      torch::data::DataLoaderOptions(options).batch_size(120));
  const auto steps = static_cast<std::int64_t>(sampler.size() / own_batch);
  Trainer trainer(arguments.precision, device, images.classes(), arguments.epochs * steps, group);
  torchfuse::Checkpoint checkpoint = trainer.checkpoint();
  const std::string stem = arguments.out + "/" + arguments.name;
  std::int64_t begin = 0;
  images::Run run{.device = device.is_cuda() ? "GPU" : images::cpu_name(),
                  .precision = arguments.precision};
  if (arguments.resume) begin = resume(stem + ".pt", checkpoint, run);
  std::int64_t end = arguments.epochs;
  if (arguments.stop_after > 0) end = std::min(end, arguments.stop_after);
  if (begin >= end) {
    throw std::invalid_argument(stem + ".pt has " + std::to_string(begin) +
                                " epochs already, and " + std::to_string(end) + " are asked for");
  }
  std::optional<digits::ProgressBar> bar;
  if (rank == 0) bar.emplace(arguments.name, (end - begin) * steps);
  for (std::int64_t epoch = begin; epoch < end; ++epoch) {
    images.set_epoch(epoch);
    sampler.set_epoch(epoch);
    auto start = std::chrono::steady_clock::now();
    for (const auto& batch : *loader) {
      run.losses.push_back(trainer.step(batch.data, batch.target));
      const auto now = std::chrono::steady_clock::now();
      run.step_seconds.push_back(std::chrono::duration<double>(now - start).count());
      start = now;
      if (bar) bar->advance();
    }
    run.accuracies.push_back(accuracy(trainer, *test_loader));
    checkpoint.value("epoch", epoch + 1).value("losses", c10::List<double>(run.losses));
    checkpoint.value("accuracies", c10::List<double>(run.accuracies));
    checkpoint.value("step_seconds", c10::List<double>(run.step_seconds));
    torchfuse::save_checkpoint(stem + ".pt", checkpoint);
  }
  if (rank != 0) return;
  bar->finish();
  run.memory = images::memory_now(device);
  report(run, trainer, stem);
}

void start(const Arguments& arguments) {
  if (std::getenv("RANK") == nullptr) {
    train(arguments, nullptr);
    return;
  }
  const ProcessGroup group =
      torchfuse::parallel::init_process_group(torchfuse::parallel::ProcessGroupOptions().backend(
          torch::Device(arguments.device).is_cuda() ? "nccl" : "gloo"));
  train(arguments, &group);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    start(parse(std::vector<std::string>(argv + 1, argv + argc)));
    return EXIT_SUCCESS;
  } catch (const c10::Error& error) {
    std::cerr << "train_images: " << error.what_without_backtrace() << '\n';
  } catch (const std::exception& error) {
    std::cerr << "train_images: " << error.what() << '\n';
  }
  return EXIT_FAILURE;
}
