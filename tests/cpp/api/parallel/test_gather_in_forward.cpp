// SPDX-License-Identifier: BSD-3-Clause
// Parameters that arrive beside the next forward pass: nobody sees them before.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/checkpoint.h>
#include <torchfuse/optim/fused_adam.h>
#include <torchfuse/parallel/sharded_optimizer.h>
#include <torchfuse/weights.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../optim/optim_testing.h"
#include "parallel_testing.h"
#include "scattered_testing.h"
#include "sharded_testing.h"

namespace torchfuse::sharded_testing {
namespace {

using optim::FusedAdam;
using optim::FusedAdamOptions;
using parallel::GatherModules;
using parallel::ProcessGroup;
using ShardedAdam = parallel::ShardedOptimizer<FusedAdam>;
using testing::error_of;
using testing::expect_equal;
using testing::expect_error;

/// Three layers of which each tells when it needs its parameters.
struct NetImpl : torch::nn::Module {
  NetImpl() {
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

  GatherModules modules(std::vector<std::size_t> which) const {
    GatherModules found;
    for (const std::size_t index : which) found.push_back(layers.at(index).ptr());
    return found;
  }

  std::vector<torch::nn::Linear> layers;
  std::function<void(const torch::nn::Module&)> before = [](const torch::nn::Module&) {};
};
TORCH_MODULE(Net);
using Model = parallel::DistributedDataParallel<NetImpl>;

// With real ranks.

/// The parameters after steps in which two of three layers wait for theirs, or none does.
std::vector<torch::Tensor> trained(ProcessGroup& group, bool scatters, bool in_forward) {
  Net net;
  Model model(net, group, small_buckets());
  const auto options = FusedAdamOptions(0.05).max_grad_norm(1.0).ema_decay(0.5);
  const GatherModules units = in_forward ? net->modules({0, 1}) : GatherModules();
  auto optimizer = scatters ? ShardedAdam(net->parameters(), options, model, units)
                            : ShardedAdam(net->parameters(), options, group, units);
  if (in_forward) {
    net->before = [&](const torch::nn::Module& layer) {
      if (&layer != net->layers[2].get()) optimizer.finish_gather(layer);
    };
  }
  for (int step = 0; step < kShardedSteps; ++step) {
    optimizer.zero_grad();
    const auto shift = 10.0 * (step + 1) + static_cast<double>(group.rank());
    model.forward(waves({5, 8}, shift).to(torch::kFloat)).square().mean().backward();
    optimizer.step();
    if (step == 1) {
      const optim::EmaWeights averages(optimizer);
      model.forward(waves({5, 8}, shift).to(torch::kFloat));
    }
  }
  optimizer.finish_gather();
  return values_of(*net);
}

TEST(GatherInForward, ParametersAreThoseOfGathersInTheStep) {
  for (const bool scatters : {false, true}) {
    for (const std::int64_t ranks : {1, 2, 3}) {
      SCOPED_TRACE(c10::str("stage ", scatters ? 2 : 1, " on ", ranks, " ranks"));
      run_on_ranks(ranks, [&](ProcessGroup& group) {
        expect_equal(trained(group, scatters, true), trained(group, scatters, false));
      });
    }
  }
}

TEST(GatherInForward, ModulesThatDifferBetweenRanksAreRefused) {
  expect_refusal(kWho +
                     ": expected the parameters, their gradients and the options to be the same on "
                     "all ranks, got gather_in_forward over parameters [0, 1] on rank 0 and "
                     "gather_in_forward over parameters [2, 3] on rank 1. Let every process do the "
                     "same.",
                 [](ProcessGroup& group) {
                   Net net;
                   const auto own = static_cast<std::size_t>(group.rank());
                   ShardedAdam(net->parameters(), {}, group, net->modules({own}));
                 });
}

TEST(GatherInForward, ModulesThatCannotWaitAreRefusedOnAllRanks) {
  const auto refused = [](const GatherModules& modules) {
    return [modules](ProcessGroup& group) {
      Net net;
      const void* before = net->layers[0]->weight.const_data_ptr();
      GatherModules units = net->modules({0});
      units.insert(units.end(), modules.begin(), modules.end());
      try {
        ShardedAdam(net->parameters(), {}, group, units);
      } catch (...) {
        EXPECT_EQ(net->layers[0]->weight.const_data_ptr(), before);
        throw;
      }
    };
  };
  expect_refusal(kWho + ": expected gather_in_forward[1] to be a module, got none.",
                 refused({nullptr}));
  expect_refusal(kWho +
                     ": expected gather_in_forward[1] to have parameters of the optimizer, got a "
                     "torch::nn::LinearImpl without. Leave it out.",
                 refused({torch::nn::Linear(1, 1).ptr()}));
}

// With a second rank whose parts arrive when somebody waits for them, and not before.

/// A message under way: until somebody waits for it, nothing has arrived, and what is sent must stay.
class LateWork : public c10d::Work {
 public:
  explicit LateWork(std::string failure) : failure_(std::move(failure)) {}
  bool wait(std::chrono::milliseconds) override {
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

 private:
  std::string failure_;
};

class Late : public c10d::Backend {
 public:
  Late() : c10d::Backend(/*rank=*/0, /*size=*/2) {}
  const std::string getBackendName() const override { return "late"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>&,
                                           const c10d::AllreduceOptions& options) override {
    EXPECT_EQ(options.reduceOp, c10d::ReduceOp::MAX);  // of two equal ranks
    return c10::make_intrusive<LateWork>("");
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    const auto work = c10::make_intrusive<LateWork>(failure);
    if (options.rootRank == 1) {
      work->received = tensors.at(0);
      work->value = value;
    } else {
      work->sent = tensors.at(0);
      work->copy = work->sent.clone();
    }
    return work;
  }

  float value = 0;      ///< of all parameters of rank 1 in the next gather
  std::string failure;  ///< what waiting for the next gather throws
};

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
    return std::make_unique<ShardedAdam>(
        net_->parameters(), FusedAdamOptions(0.05).ema_decay(0.5), group_, net_->modules({0, 1}));
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
  Net net_;
};

TEST_F(LateParameters, ArriveWhenTheirModuleWaits) {
  const auto optimizer = make_optimizer();
  step(*optimizer, 1);
  EXPECT_EQ(biases(), Biases({1, 1, 1})) << "nobody has been seen to wait";
  step_with_all_under_way(*optimizer, 2);
  EXPECT_EQ(biases(), Biases({1, 1, 2})) << "nobody waits for the third";
  optimizer->finish_gather(*net_->layers[0]);
  EXPECT_EQ(biases(), Biases({2, 1, 2}));
  step(*optimizer, 3);
  EXPECT_EQ(biases(), Biases({2, 3, 3})) << "the second has not run";
  optimizer->finish_gather();
  EXPECT_EQ(biases(), Biases({3, 3, 3}));
}

TEST_F(LateParameters, ArriveBeforeTheNextStep) {
  const auto optimizer = make_optimizer();
  step_with_all_under_way(*optimizer, 1);
  step(*optimizer, 2);
  EXPECT_EQ(biases(), Biases({2, 2, 2})) << "nobody has been seen to wait";
}

TEST_F(LateParameters, ArriveBeforeAveragesTakeTheirPlaceAndAfter) {
  const auto optimizer = make_optimizer();
  step_with_all_under_way(*optimizer, 1);
  step_with_all_under_way(*optimizer, 2);
  for (const std::size_t layer : {0, 1}) optimizer->finish_gather(*net_->layers[layer]);
  step(*optimizer, 3);
  {
    late_->value = 4;
    const optim::EmaWeights averages(*optimizer);
    EXPECT_EQ(biases(), Biases({4, 4, 4}));
    for (const std::size_t layer : {0, 1}) optimizer->finish_gather(*net_->layers[layer]);
    late_->value = 5;
  }
  EXPECT_EQ(biases(), Biases({5, 5, 5}));
}

TEST_F(LateParameters, ArriveBeforeTheyAreSavedOrLoaded) {
  const std::string path = ::testing::TempDir() + "late_weights.safetensors";
  const std::string whole = ::testing::TempDir() + "late_checkpoint.pt";
  const auto optimizer = make_optimizer();
  step_with_all_under_way(*optimizer, 1);
  step_with_all_under_way(*optimizer, 2);
  save_weights(path, *net_);
  EXPECT_EQ(biases(), Biases({2, 2, 2}));
  step_with_all_under_way(*optimizer, 3);
  save_checkpoint(whole, Checkpoint().model(*net_));
  EXPECT_EQ(biases(), Biases({3, 3, 3}));
  step_with_all_under_way(*optimizer, 4);
  load_weights(path, *net_);
  optimizer->finish_gather();
  EXPECT_EQ(biases(), Biases({2, 2, 2}));
  step_with_all_under_way(*optimizer, 5);
  load_checkpoint(whole, Checkpoint().model(*net_));
  optimizer->finish_gather();
  EXPECT_EQ(biases(), Biases({3, 3, 3}));
  std::filesystem::remove(path);
  std::filesystem::remove(whole);
}

TEST_F(LateParameters, ArriveBeforeAnotherOptimizerTakesThem) {
  const auto optimizer = make_optimizer();
  step_with_all_under_way(*optimizer, 1);
  step_with_all_under_way(*optimizer, 2);
  const auto next = make_optimizer();
  EXPECT_EQ(biases(), Biases({2, 2, 2}));
}

TEST_F(LateParameters, ArriveBeforeTheirOptimizerIsGone) {
  auto optimizer = make_optimizer();
  step_with_all_under_way(*optimizer, 1);
  step_with_all_under_way(*optimizer, 2);
  optimizer.reset();
  EXPECT_EQ(biases(), Biases({2, 2, 2}));
}

TEST_F(LateParameters, AreNotWaitedForWhileAnExceptionUnwinds) {
  const auto fail = [&] {
    const auto optimizer = make_optimizer();
    step(*optimizer, 1);
    step_with_all_under_way(*optimizer, 2);
    throw std::runtime_error("another rank is gone");
  };
  EXPECT_THROW(fail(), std::runtime_error);
  EXPECT_EQ(biases(), Biases({1, 1, 2}));
}

struct Warnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;
};

TEST_F(LateParameters, ThatDoNotArriveAreNamed) {
  auto optimizer = make_optimizer();
  step(*optimizer, 1);
  late_->failure = "Connection closed by peer";
  const std::string missing =
      kWho +
      ": expected all 2 ranks of group 'late' in the gather of what each has updated within the "
      "group's timeout, got in rank 0: Connection closed by peer";
  // The third layer's arrive in the step.
  EXPECT_ERROR([&] { step_with_all_under_way(*optimizer, 2); }, missing);
  EXPECT_ERROR([&] { optimizer->finish_gather(*net_->layers[0]); }, missing);
  Warnings warnings;
  {
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    optimizer.reset();
  }
  ASSERT_EQ(warnings.texts.size(), 1);
  EXPECT_PRED_FORMAT2(::testing::IsSubstring, "the model has parameters of different steps",
                      warnings.texts[0]);
}

TEST_F(LateParameters, AreThoseOfListedModules) {
  const auto optimizer = make_optimizer();
  EXPECT_ERROR([&] { optimizer->finish_gather(*net_->layers[2]); },
               kWho +
                   "::finish_gather: expected a module of gather_in_forward, got a "
                   "torch::nn::LinearImpl that is none of its 2. List it when the optimizer is "
                   "made.");
}

}  // namespace
}  // namespace torchfuse::sharded_testing
