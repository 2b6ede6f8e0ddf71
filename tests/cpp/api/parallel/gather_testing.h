// SPDX-License-Identifier: BSD-3-Clause
// A model that waits for its parameters, and a rank whose parameters arrive when somebody does.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/optim/fused_adam.h>
#include <torchfuse/parallel/distributed_data_parallel.h>
#include <torchfuse/parallel/sharded_optimizer.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "sharded_testing.h"

namespace torchfuse::sharded_testing {

/// Three layers of which each tells when it needs its parameters.
struct WaitingNetImpl : torch::nn::Module {
  WaitingNetImpl() {
    double shift = 0.0;
    for (const char* name : {"first", "second", "third"}) {
      layers.push_back(register_module(name, torch::nn::Linear(8, 8)));
    }
    const torch::NoGradGuard no_grad;
    for (const torch::Tensor& param : parameters()) {
      param.copy_(waves(param.sizes(), shift += 1.0) * 0.5);
    }
  }

  torch::Tensor forward(torch::Tensor x) {
    for (auto& layer : layers) {
      before(*layer);
      x = torch::tanh(layer(x));
    }
    return x;
  }

  parallel::GatherModules modules(std::vector<std::size_t> which) const {
    parallel::GatherModules found;
    for (const std::size_t index : which) found.push_back(layers.at(index).ptr());
    return found;
  }

  std::vector<torch::nn::Linear> layers;
  std::function<void(const torch::nn::Module&)> before = [](const torch::nn::Module&) {};
};
TORCH_MODULE(WaitingNet);
using WaitingModel = parallel::DistributedDataParallel<WaitingNetImpl>;

/// A message under way: until somebody waits for it, nothing has arrived, and what is sent must
/// stay.
class LateWork : public c10d::Work {
 public:
  explicit LateWork(std::string failure) : failure_(std::move(failure)) {}
  bool wait(std::chrono::milliseconds) override {
    if (arrives) arrives();
    if (!failure_.empty()) {
      end();
      throw std::runtime_error(failure_);
    }
    if (received.defined()) received.view(at::kFloat).fill_(value);
    if (sent.defined()) {
      EXPECT_TRUE(torch::equal(sent, copy)) << "changed while it was sent";
    }
    end();
    return true;
  }

  /// Somebody may wait for it later, or nobody.
  void end() {
    finish(failure_.empty() ? nullptr : std::make_exception_ptr(std::runtime_error(failure_)));
  }

  at::Tensor received;
  float value = 0;
  at::Tensor sent, copy;
  std::function<void()> arrives;

 private:
  std::string failure_;
};

/// The second of two ranks, which computes nothing.
class Late : public c10d::Backend {
 public:
  Late() : c10d::Backend(/*rank=*/0, /*size=*/2) {}
  const std::string getBackendName() const override { return "late"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    // The other rank has the same.
    if (options.reduceOp == c10d::ReduceOp::SUM) tensors.at(0).mul_(2);
    return c10::make_intrusive<LateWork>("");
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    if (refusal && refusal->first-- == 0) throw std::runtime_error(refusal->second);
    const bool fails =
        options.rootRank == failing && !failure.empty() && messages_before_failure-- <= 0;
    const auto work = c10::make_intrusive<LateWork>(fails ? failure : "");
    begun.push_back(work);
    if (ends_at_once && (fails || options.rootRank == 0)) work->end();
    if (options.rootRank == 1) {
      work->received = tensors.at(0);
      work->value = value;
      work->arrives = arrives;
    } else {
      work->sent = tensors.at(0);
      work->copy = work->sent.clone();
    }
    return work;
  }

  float value = 0;                  ///< of all parameters of rank 1 in the next gather
  std::string failure;              ///< what waiting for messages of `failing` throws
  std::int64_t failing = 1;         ///< a rank
  int messages_before_failure = 0;  ///< those that arrive all the same
  bool ends_at_once = false;        ///< what fails or is sent, before somebody waits
  /// After so many messages the next one throws this when it is begun.
  std::optional<std::pair<int, std::string>> refusal;
  std::function<void()> arrives;  ///< what waiting for the next gather calls first
  std::vector<c10::intrusive_ptr<LateWork>> begun;
};

using ShardedAdam = parallel::ShardedOptimizer<optim::FusedAdam>;

struct Warnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;
};

/// A model of which the other rank has parts that arrive late.
class LateParameters : public ::testing::Test {
 protected:
  static constexpr const char* kName = "late";

  void SetUp() override {
    group_ = c10::make_intrusive<c10d::ProcessGroup>(/*rank=*/0, /*size=*/2);
    group_->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, late_);
    group_->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
    group_->setGroupName(kName);
    c10d::register_process_group(kName, group_);
  }
  void TearDown() override { c10d::unregister_process_group(kName); }

  std::unique_ptr<ShardedAdam> make_optimizer() {
    return std::make_unique<ShardedAdam>(net_->parameters(),
                                         optim::FusedAdamOptions(0.05).ema_decay(0.5), group_,
                                         net_->modules({0, 1}));
  }

  /// A step, and a next forward pass of both modules.
  void step(ShardedAdam& optimizer, float value) {
    late_->value = value;
    set_waves_as_grads(net_->parameters(), 0);
    optimizer.step();
  }
  void step_with_all_under_way(ShardedAdam& optimizer, float value) {
    for (const std::size_t layer : {0, 1}) optimizer.finish_gather(*net_->layers[layer]);
    step(optimizer, value);
  }

  /// Rank 1 has the whole bias of each layer.
  std::vector<float> biases() const {
    std::vector<float> found;
    for (const auto& layer : net_->layers) found.push_back(layer->bias[0].item<float>());
    return found;
  }
  using Biases = std::vector<float>;

  c10::intrusive_ptr<Late> late_ = c10::make_intrusive<Late>();
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  WaitingNet net_;
};

}  // namespace torchfuse::sharded_testing
