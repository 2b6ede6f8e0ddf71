// SPDX-License-Identifier: BSD-3-Clause
// The C++ side of benchmarks/data_parallel.py, which starts it under torchrun:
//   torchfuse_bench_data_parallel <mlp|cnn> <seed> <warmup> <steps> <out.json>
// benchmarks/data_parallel_peer.py builds the same models and writes the same figures.
#include <torch/torch.h>
#include <torchfuse/nn/sync_batch_norm.h>
#include <torchfuse/parallel/convert_sync_batch_norm.h>
#include <torchfuse/parallel/distributed_data_parallel.h>
#include <torchfuse/parallel/process_group.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <fstream>
#include <iostream>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using torchfuse::parallel::DistributedDataParallel;
using torchfuse::parallel::DistributedDataParallelOptions;
using torchfuse::parallel::ProcessGroup;
using torchfuse::parallel::ProcessGroupOptions;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kClasses = 10;
constexpr std::int64_t kWidth = 1536;
constexpr double kLearningRate = 0.1;

struct Arguments {
  std::string model;
  std::uint64_t seed = 0;
  std::int64_t warmup = 0;
  std::int64_t steps = 0;
  std::string out;
};

struct Figures {
  std::vector<std::int64_t> bucket_bytes;
  std::vector<double> losses;
  std::vector<double> seconds;
};

/// Five hidden layers: 11 million parameters.
torch::nn::Sequential make_mlp() {
  torch::nn::Sequential model;
  for (const std::int64_t inputs : {std::int64_t{1024}, kWidth, kWidth, kWidth, kWidth}) {
    model->push_back(torch::nn::Linear(inputs, kWidth));
    model->push_back(torch::nn::ReLU());
  }
  model->push_back(torch::nn::Linear(kWidth, kClasses));
  return model;
}

/// Three convolutions, each with a SyncBatchNorm: 95 thousand parameters.
torch::nn::Sequential make_cnn() {
  torch::nn::Sequential model;
  std::int64_t channels = 3;
  for (const std::int64_t wider : {32, 64, 128}) {
    model->push_back(
        torch::nn::Conv2d(torch::nn::Conv2dOptions(channels, wider, 3).padding(1).bias(false)));
    model->push_back(
        torchfuse::nn::SyncBatchNorm(torchfuse::nn::SyncBatchNormOptions(wider).fuse_relu(true)));
    model->push_back(torch::nn::MaxPool2d(2));
    channels = wider;
  }
  model->push_back(torch::nn::AdaptiveAvgPool2d(1));
  model->push_back(torch::nn::Flatten());
  model->push_back(torch::nn::Linear(channels, kClasses));
  return model;
}

/// A rank's part of the batch.
std::vector<std::int64_t> input_sizes(const std::string& model) {
  if (model == "mlp") return {64, 1024};
  if (model == "cnn") return {32, 3, 32, 32};
  throw std::invalid_argument("expected the model to be mlp or cnn, got " + model);
}

std::vector<std::int64_t> ranks_of(const ProcessGroup& group) {
  std::vector<std::int64_t> ranks(static_cast<std::size_t>(group.world_size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

template <class Parallel>
std::vector<std::int64_t> bucket_bytes(const Parallel& parallel) {
  const auto parameters = parallel.module()->named_parameters();
  std::vector<std::int64_t> sizes;
  for (const auto& bucket : parallel.buckets()) {
    std::int64_t& size = sizes.emplace_back(0);
    for (const auto& name : bucket) size += static_cast<std::int64_t>(parameters[name].nbytes());
  }
  return sizes;
}

/// Trains, and times the steps after the warm-up.
Figures measure(const Arguments& arguments, ProcessGroup& group) {
  const std::vector<std::int64_t> sizes = input_sizes(arguments.model);
  const auto norms = group.new_group(ranks_of(group));
  torch::manual_seed(arguments.seed);
  torch::nn::Sequential model = arguments.model == "mlp" ? make_mlp() : make_cnn();
  torchfuse::parallel::convert_sync_batch_norm(*model, norms->name());
  // Buckets of 1 MiB, then 25 MiB, by default. Those buffers are equal on all ranks anyway.
  DistributedDataParallel parallel(model, group,
                                   DistributedDataParallelOptions().broadcast_buffers(false));
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(kLearningRate));
  torch::manual_seed(arguments.seed + 1 + static_cast<std::uint64_t>(group.rank()));
  const torch::Tensor data = torch::randn(sizes);
  const torch::Tensor target = torch::randint(kClasses, {sizes[0]}, torch::kLong);
  std::vector<torch::Tensor> losses;
  const auto step = [&] {
    optimizer.zero_grad(/*set_to_none=*/true);
    const torch::Tensor loss = torch::nn::functional::cross_entropy(parallel.forward(data), target);
    loss.backward();
    optimizer.step();
    losses.push_back(loss.detach());
  };

  for (std::int64_t i = 0; i < arguments.warmup; ++i) step();
  Figures figures;
  group.barrier();
  Clock::time_point begin = Clock::now();
  for (std::int64_t i = 0; i < arguments.steps; ++i) {
    step();
    const Clock::time_point end = Clock::now();
    figures.seconds.push_back(std::chrono::duration<double>(end - begin).count());
    begin = end;
  }
  group.barrier();
  figures.bucket_bytes = bucket_bytes(parallel);
  for (const torch::Tensor& loss : losses) figures.losses.push_back(loss.item<double>());
  return figures;
}

template <class Value>
void write_list(std::ostream& file, const char* name, const std::vector<Value>& values) {
  file << ", \"" << name << "\": [";
  for (std::size_t i = 0; i < values.size(); ++i) file << (i == 0 ? "" : ", ") << values[i];
  file << ']';
}

void write(const Figures& figures, const std::string& path) {
  std::ofstream file(path);
  file.precision(17);
  file << "{\"torch\": \"" << TORCH_VERSION << '"';
  write_list(file, "bucket_bytes", figures.bucket_bytes);
  write_list(file, "losses", figures.losses);
  write_list(file, "seconds", figures.seconds);
  file << "}\n";
  if (!file.flush()) throw std::runtime_error("expected to be able to write " + path);
}

void run(const Arguments& arguments) {
  torch::set_num_threads(1);
  auto group = torchfuse::parallel::init_process_group(ProcessGroupOptions().backend("gloo"));
  const Figures figures = measure(arguments, group);
  if (group.rank() == 0) write(figures, arguments.out);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::cerr << "usage: torchfuse_bench_data_parallel <mlp|cnn> <seed> <warmup> <steps> <out>\n";
    return 2;
  }
  try {
    run({argv[1], std::stoull(argv[2]), std::stoll(argv[3]), std::stoll(argv[4]), argv[5]});
    return 0;
  } catch (const c10::Error& error) {
    std::cerr << "error: " << error.what_without_backtrace() << '\n';
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
  }
  return 1;
}
