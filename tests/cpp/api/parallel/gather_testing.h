// SPDX-License-Identifier: BSD-3-Clause
// A model that waits for its parameters, and a rank whose parameters arrive when somebody does.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/parallel/distributed_data_parallel.h>
#include <torchfuse/parallel/sharded_optimizer.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <functional>
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
    if (!failure_.empty()) throw std::runtime_error(failure_);
    if (received.defined()) received.view(at::kFloat).fill_(value);
    if (sent.defined()) {
      EXPECT_TRUE(torch::equal(sent, copy)) << "changed while it was sent";
    }
    return true;
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
    const auto work = c10::make_intrusive<LateWork>(failure);
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

  float value = 0;                ///< of all parameters of rank 1 in the next gather
  std::string failure;            ///< what waiting for the next gather throws
  std::function<void()> arrives;  ///< what waiting for the next gather calls first
};

}  // namespace torchfuse::sharded_testing
