// SPDX-License-Identifier: BSD-3-Clause
// Ranks as threads of one process, and parameters that are the same in all of them.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/parallel/process_group.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace torchfuse::sharded_testing {

constexpr int kShardedSteps = 4;
/// Begins messages.
inline const std::string kWho = "torchfuse::parallel::ShardedOptimizer";

/// torch's recorder of collectives is one for the process, and two groups that begin one at the
/// same time write its maps without a lock (torch 2.11, FlightRecorder::record). Threads that are
/// ranks do so all the time; without entries it records nothing. Read once, at the first
/// collective.
inline const bool kNoRecorder = setenv("TORCH_FR_BUFFER_SIZE", "0", 1) == 0;

/// Calls `body` in so many threads, each a rank of one group. What each threw; empty: nothing.
inline std::vector<std::string> on_ranks(
    std::int64_t ranks, const std::function<void(parallel::ProcessGroup&)>& body,
    std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
  using namespace std::chrono_literals;
  c10d::set_thread_isolation_mode(true);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  // A process counts how often it joined a group of a name; here, threads join as other ranks.
  static int groups = 0;
  const std::string name = "threads" + std::to_string(groups++);
  std::vector<std::string> errors(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        auto group = parallel::init_process_group(store, parallel::ProcessGroupOptions()
                                                             .backend("gloo")
                                                             .name(name)
                                                             .rank(rank)
                                                             .world_size(ranks)
                                                             .timeout(timeout)
                                                             .leave_timeout(2s));
        body(group);
      } catch (const c10::Error& error) {
        errors[static_cast<std::size_t>(rank)] = error.what_without_backtrace();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  c10d::set_thread_isolation_mode(false);
  return errors;
}

/// The same on ranks that throw nothing.
inline void run_on_ranks(std::int64_t ranks,
                         const std::function<void(parallel::ProcessGroup&)>& body) {
  for (const std::string& error : on_ranks(ranks, body)) EXPECT_EQ(error, "");
}

/// All of two ranks throw one sentence that begins like this.
inline void expect_refusal(const std::string& begin,
                           const std::function<void(parallel::ProcessGroup&)>& body) {
  const auto errors = on_ranks(2, body);
  EXPECT_EQ(errors[0], errors[1]);
  EXPECT_EQ(errors[0].substr(0, begin.size()), begin);
}

/// Numbers that do not depend on torch's generator, which threads share.
inline torch::Tensor waves(at::IntArrayRef sizes, double shift) {
  const auto count = c10::multiply_integers(sizes);
  return torch::sin(torch::arange(count, torch::kDouble) * 0.7 + shift).reshape(sizes);
}

/// With cuts of two and three ranks inside of a parameter, a scalar, and one without elements.
inline std::vector<torch::Tensor> sharded_params(torch::ScalarType dtype = torch::kFloat) {
  const std::vector<std::vector<std::int64_t>> sizes{{7, 5}, {3}, {64, 33},    {1},
                                                     {},     {0}, {4, 3, 3, 3}};
  std::vector<torch::Tensor> params;
  for (const auto& each : sizes) {
    const auto shift = static_cast<double>(params.size());
    torch::Tensor value = waves(each, shift).to(dtype);
    if (each.size() == 4) value = value.contiguous(torch::MemoryFormat::ChannelsLast);
    params.push_back(value.requires_grad_(true));
  }
  return params;
}

inline void set_waves_as_grads(const std::vector<torch::Tensor>& params, int step,
                               double factor = 1.0) {
  for (std::size_t index = 0; index < params.size(); ++index) {
    const torch::Tensor& param = params[index];
    const double shift = 10.0 * (step + 1) + static_cast<double>(index);
    param.mutable_grad() =
        torch::empty_like(param.detach()).copy_(waves(param.sizes(), shift) * factor);
  }
}

/// Steps with rates that change.
template <class Optimizer>
void train_sharded(Optimizer& optimizer, const std::vector<torch::Tensor>& params, int begin = 0,
                   int end = kShardedSteps) {
  for (int step = begin; step < end; ++step) {
    set_waves_as_grads(params, step);
    optimizer.step();
    auto& options = optimizer.param_groups()[0].options();
    options.set_lr(options.get_lr() * 0.5);
  }
}

}  // namespace torchfuse::sharded_testing
