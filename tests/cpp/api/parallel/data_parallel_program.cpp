// SPDX-License-Identifier: BSD-3-Clause
// A training program of several processes, started by tests/python/parallel, which computes the
// same by other means; all values come from formulas that both know.
//
//   torchfuse_programs data_parallel MODE FOLDER [cuda]
//
// writes losses and parameters to FOLDER/rank<rank>.txt.
#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <limits>
#include <optional>
#include <string>
#include <thread>

#include "../programs.h"

namespace data_parallel_program {
namespace {

using torchfuse::parallel::DistributedDataParallel;
using torchfuse::parallel::DistributedDataParallelOptions;
using torchfuse::parallel::ProcessGroup;
using torchfuse::parallel::ProcessGroupOptions;

constexpr int kSteps = 6;
constexpr int kBatch = 4;  // per process

/// Of this process: Gloo on the CPU, or NCCL on a CUDA device of its own.
torch::Device device = torch::kCPU;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(6, 16));
    norm = register_module("norm", torch::nn::BatchNorm1d(16));
    second = register_module("second", torch::nn::Linear(16, 8));
    spare = register_module("spare", torch::nn::Linear(8, 8));
    never = register_module("never", torch::nn::Linear(8, 8));
    last = register_module("last", torch::nn::Linear(8, 3));
  }
  torch::Tensor forward(torch::Tensor x, bool with_norm, bool with_spare, bool with_never) {
    x = first(x);
    if (with_norm) x = norm(x);
    x = torch::tanh(second(torch::tanh(x)));
    if (with_spare) x = torch::tanh(spare(x));
    if (with_never) x = torch::tanh(never(x));
    return last(x);
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, spare{nullptr}, never{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

/// Rank 0 starts from known values, others from anything.
void fill(Net& net, int64_t rank) {
  const torch::NoGradGuard no_grad;
  double shift = 0.0;
  for (auto& parameter : net->parameters()) {
    parameter.copy_(wave(parameter.sizes(), shift).to(torch::kFloat) * 0.3);
    if (rank != 0) parameter.fill_(static_cast<double>(rank));
    shift += 1.0;
  }
}

class Report {
 public:
  Report(const std::string& folder, int64_t rank)
      : file_(folder + "/rank" + std::to_string(rank) + ".txt") {
    file_.precision(std::numeric_limits<float>::max_digits10);
  }
  void tensor(const std::string& name, const torch::Tensor& value) {
    const torch::Tensor flat =
        value.detach().to(torch::kCPU, torch::kFloat).reshape({-1}).contiguous();
    file_ << name;
    for (int64_t index = 0; index < flat.numel(); ++index) {
      file_ << ' ' << flat.const_data_ptr<float>()[index];
    }
    file_ << '\n';
  }
  void text(const std::string& name, const std::string& value) {
    file_ << name << ' ' << value << '\n';
  }
  void module(const torch::nn::Module& module) {
    for (const auto& item : module.named_parameters()) tensor(item.key(), item.value());
    for (const auto& item : module.named_buffers()) tensor(item.key(), item.value());
  }

 private:
  std::ofstream file_;
};

struct Part {
  torch::Tensor data;
  torch::Tensor target;
};

/// This rank's rows of the step's batch.
Part part_of(int64_t step, const ProcessGroup& group) {
  const int64_t rows = kBatch * group.world_size();
  const auto shift = static_cast<double>(10 * step);
  const auto own = [&](const torch::Tensor& all) {
    return all.narrow(0, group.rank() * kBatch, kBatch).to(device, torch::kFloat);
  };
  return {own(wave({rows, 6}, shift)), own(wave({rows, 3}, shift + 5.0))};
}

/// Plain training; with norms the ranks' statistics differ, and buffers are rank 0's. Twice: the
/// loss is that of two forwards.
void train(const ProcessGroup& group, Report& report, const std::string& mode) {
  Net net;
  fill(net, group.rank());
  net->to(device);
  const bool twice = mode == "twice";
  const bool with_norm = mode == "norm" || twice;
  const bool unused = mode == "unused";
  DistributedDataParallelOptions options;
  options.first_bucket_bytes(400).bucket_bytes(600).find_unused_parameters(unused);
  DistributedDataParallel parallel(net, group, options);
  if (!with_norm) net->norm->eval();
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const bool replace = mode != "keep";
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad(/*set_to_none=*/replace);
    const auto [data, target] = part_of(step, group);
    // Unused: `never` by all ranks, `spare` by rank 0 and in odd steps only by others.
    const bool spare = !unused || (group.rank() != 0 && step % 2 == 1);
    const bool never = !unused;
    const auto predicted = parallel.forward(data, !unused, spare, never);
    auto loss = torch::mse_loss(predicted, target);
    if (twice) {
      loss = loss + torch::mse_loss(parallel.forward(-data, true, spare, never), target);
    }
    loss.backward();
    optimizer.step();
    report.tensor("loss", loss);
  }
  if (unused) {
    report.text("never.grad", net->never->weight.grad().defined() ? "defined" : "undefined");
  }
  parallel.sync_buffers();
  report.module(*net);
  std::string buckets;
  for (const auto& bucket : parallel.buckets()) {
    for (const auto& name : bucket) buckets += name + ",";
    buckets += ";";
  }
  report.text("buckets", buckets);
}

/// Two local backwards, then one that averages, with our optimizer and a loss scaler.
void accumulate(const ProcessGroup& group, Report& report) {
  Net net;
  fill(net, group.rank());
  net->to(device);
  net->norm->eval();
  DistributedDataParallel parallel(net, group);
  torchfuse::optim::FusedAdam optimizer(net->parameters(),
                                        torchfuse::optim::FusedAdamOptions(0.01));
  torchfuse::amp::GradScaler scaler(
      device.type(), torchfuse::amp::GradScalerOptions().process_group(group.name()));
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (int micro = 0; micro < 3; ++micro) {
      const auto backward = [&] {
        const auto [data, target] = part_of(3 * step + micro, group);
        auto loss = torch::mse_loss(parallel.forward(data, true, true, true), target) / 3;
        // Rank 1 overflows once: all ranks must skip that step.
        if (step == 2 && micro == 1 && group.rank() == 1) {
          loss = loss * std::numeric_limits<float>::infinity();
        }
        scaler.scale(loss).backward();
      };
      if (micro < 2) {
        const auto guard = parallel.no_sync();
        backward();
      } else {
        backward();
      }
    }
    scaler.step(optimizer);
    scaler.update();
  }
  report.text("skipped", std::to_string(scaler.skipped_steps()));
  report.module(*net);
}

void sub_groups(ProcessGroup& group, Report& report) {
  std::optional<ProcessGroup> ends = group.new_group({group.world_size() - 1, 0});
  report.text("member", ends ? ends->name() + " " + std::to_string(ends->rank()) : "no");
  if (ends) {
    const auto value = torch::full({2}, static_cast<float>(group.rank() + 1), device);
    torchfuse::all_reduce_(value, "sum", {ends->name()});
    report.tensor("sum", value);
    ends->barrier();
  }
  group.barrier();
}

/// Rank 1 ends, or stops, between forward and backward.
void lose_a_rank(const ProcessGroup& group, int signal) {
  Net net;
  net->norm->eval();
  DistributedDataParallel parallel(net, group);
  for (int step = 0; step < kSteps; ++step) {
    const auto [data, target] = part_of(step, group);
    const auto loss = torch::mse_loss(parallel.forward(data, true, true, true), target);
    if (step == 3 && group.rank() == 1) kill(getpid(), signal);
    loss.backward();
  }
}

/// Indices of three epochs for a number of sizes, one line each.
void sample() {
  using torchfuse::parallel::DistributedSampler;
  using torchfuse::parallel::DistributedSamplerOptions;
  for (const std::size_t size : {1, 2, 7, 10, 100}) {
    for (const int64_t replicas : {1, 2, 3, 8}) {
      for (const bool drop_last : {false, true}) {
        for (const bool shuffle : {false, true}) {
          DistributedSampler sampler(size, DistributedSamplerOptions()
                                               .num_replicas(replicas)
                                               .rank(replicas - 1)
                                               .shuffle(shuffle)
                                               .drop_last(drop_last)
                                               .seed(42));
          for (int64_t epoch = 0; epoch < 3; ++epoch) {
            sampler.set_epoch(epoch);
            sampler.reset();
            std::cout << size << ' ' << replicas << ' ' << drop_last << ' ' << shuffle << ' '
                      << epoch;
            for (const std::size_t index : sampler.indices()) std::cout << ' ' << index;
            std::cout << '\n';
          }
        }
      }
    }
  }
}

/// Waits until all processes have started. A short time limit begins after that: a busy machine
/// starts them one by one.
void wait_for_start(const std::string& folder) {
  const auto sign = [&](const std::string& rank) { return folder + "/started" + rank; };
  std::ofstream(sign(std::getenv("RANK"))).put('\n');
  for (int rank = 0; rank < std::stoi(std::getenv("WORLD_SIZE")); ++rank) {
    while (!std::filesystem::exists(sign(std::to_string(rank)))) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
}

void run(const std::string& mode, const std::string& folder, bool on_cuda) {
  ProcessGroupOptions options;
  options.backend(on_cuda ? "nccl" : "gloo");
  if (mode == "killed" || mode == "stopped") {
    wait_for_start(folder);
    options.timeout(std::chrono::seconds(5)).leave_timeout(std::chrono::seconds(1));
  }
  auto group = torchfuse::parallel::init_process_group(options);
  if (on_cuda) {
    device = torch::Device(torch::kCUDA, static_cast<c10::DeviceIndex>(group.local_rank()));
  }
  Report report(folder, group.rank());
  if (mode == "accumulate") return accumulate(group, report);
  if (mode == "groups") return sub_groups(group, report);
  if (mode == "killed") return lose_a_rank(group, SIGKILL);
  if (mode == "stopped") return lose_a_rank(group, SIGSTOP);
  if (mode == "different_groups") {
    group.new_group({0, group.rank() == 0 ? 1 : 2});
    return;
  }
  train(group, report, mode);
}

}  // namespace

void start(const Arguments& arguments) {
  const bool on_cuda = arguments.size() == 3 && arguments[2] == "cuda";
  TORCH_CHECK(arguments.size() == 2 || on_cuda, "expected MODE FOLDER [cuda], got ",
              arguments.size(), " arguments.");
  torch::set_num_threads(1);
  if (arguments[0] == "sampler") return sample();
  run(arguments[0], arguments[1], on_cuda);
}

}  // namespace data_parallel_program
