// SPDX-License-Identifier: BSD-3-Clause
// Whoever uses parameters that are under way waits for them first.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/checkpoint.h>
#include <torchfuse/optim/averaged_model.h>
#include <torchfuse/optim/fused_adam.h>
#include <torchfuse/parallel/distributed_data_parallel.h>
#include <torchfuse/parallel/sharded_optimizer.h>
#include <torchfuse/weights.h>

#include <chrono>
#include <filesystem>
#include <future>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gather_testing.h"
#include "parallel_testing.h"
#include "scattered_testing.h"
#include "sharded_testing.h"

namespace torchfuse::sharded_testing {
namespace {

using optim::FusedAdamOptions;
using testing::error_of;

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

TEST_F(LateParameters, ArriveBeforeTheyAreAveraged) {
  const auto optimizer = make_optimizer();
  step_with_all_under_way(*optimizer, 1);
  step_with_all_under_way(*optimizer, 2);
  optim::AveragedModel averaged(*net_->layers[0]);
  EXPECT_EQ(biases(), Biases({2, 2, 2}));
  step_with_all_under_way(*optimizer, 3);
  averaged.update_parameters(*net_->layers[0]);
  EXPECT_EQ(biases(), Biases({3, 3, 3}));
}

TEST_F(LateParameters, ArriveBeforeTheyAreBroadcast) {
  const auto optimizer = make_optimizer();
  step_with_all_under_way(*optimizer, 1);
  step_with_all_under_way(*optimizer, 2);
  late_->value = 3;  // of the broadcasts
  const WaitingModel model(net_, group_);
  EXPECT_EQ(biases(), Biases({2, 2, 2}));
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

/// The model keeps what the optimizer had, whose destruction is not that of the gathers.
TEST_F(LateParameters, ArriveBeforeTheOptimizerOfSplitGradientsIsGone) {
  WaitingModel model(net_, group_);
  const auto make = [&] {
    return std::make_unique<ShardedAdam>(net_->parameters(), FusedAdamOptions(), model,
                                         net_->modules({0, 1, 2}));
  };
  const auto step_without_gradients = [&](ShardedAdam& optimizer, float value) {
    for (const auto& layer : net_->layers) optimizer.finish_gather(*layer);
    late_->value = value;
    optimizer.step();
  };
  // Of one bucket, which has the last layer first, rank 1 has the first layer.
  const auto bias = [&] { return biases()[0]; };
  auto optimizer = make();
  step_without_gradients(*optimizer, 1);
  step_without_gradients(*optimizer, 2);
  EXPECT_EQ(bias(), 1);
  optimizer.reset();
  EXPECT_EQ(bias(), 2);
  optimizer = make();
  step_without_gradients(*optimizer, 3);
  *optimizer = std::move(*make());
  EXPECT_EQ(bias(), 3);
}

TEST_F(LateParameters, HaveArrivedForAllThreadsThatWait) {
  const auto optimizer = make_optimizer();
  step(*optimizer, 1);
  std::promise<void> begun;
  std::promise<void> released;
  std::once_flag once;
  const auto release = released.get_future().share();
  late_->arrives = [&, release] {
    std::call_once(once, [&] { begun.set_value(); });
    release.wait();
  };
  for (const std::size_t layer : {0, 1}) optimizer->finish_gather(*net_->layers[layer]);
  const auto wait = [&] {
    optimizer->finish_gather(*net_->layers[0]);
    return net_->layers[0]->bias[0].item<float>();
  };
  // The third layer's arrive within the step, which waits too.
  auto stepping = std::async(std::launch::async, [&] { step(*optimizer, 2); });
  begun.get_future().wait();
  auto waiting = std::async(std::launch::async, wait);
  EXPECT_EQ(waiting.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  released.set_value();
  stepping.get();
  EXPECT_EQ(waiting.get(), 2);
}

TEST_F(LateParameters, OfOneLayerHaveArrivedForBothThreadsThatWait) {
  ShardedAdam optimizer(net_->parameters(), FusedAdamOptions(), group_, net_->modules({0, 1, 2}));
  std::promise<void> begun;
  std::promise<void> released;
  std::once_flag once;
  const auto release = released.get_future().share();
  const auto wait = [&] {
    optimizer.finish_gather(*net_->layers[0]);
    return net_->layers[0]->bias[0].item<float>();
  };
  for (const auto& layer : net_->layers) optimizer.finish_gather(*layer);
  late_->arrives = [&, release] {
    std::call_once(once, [&] { begun.set_value(); });
    release.wait();
  };
  step(optimizer, 2);
  auto first = std::async(std::launch::async, wait);
  begun.get_future().wait();
  auto second = std::async(std::launch::async, wait);
  EXPECT_EQ(second.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  released.set_value();
  EXPECT_EQ(first.get(), 2);
  EXPECT_EQ(second.get(), 2);
}

TEST_F(LateParameters, AreNotWaitedForWhileAnExceptionUnwinds) {
  const auto fail = [&] {
    const auto optimizer = make_optimizer();
    step(*optimizer, 1);
    step_with_all_under_way(*optimizer, 2);
    throw std::runtime_error("another rank is gone");
  };
  Warnings warnings;
  {
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    EXPECT_THROW(fail(), std::runtime_error);
  }
  EXPECT_EQ(biases(), Biases({1, 1, 2}));
  ASSERT_EQ(warnings.texts.size(), 1);
  EXPECT_PRED_FORMAT2(::testing::IsSubstring, "the model has parameters of different steps",
                      warnings.texts[0]);
}

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
  for (int again = 0; again < 2; ++again) {
    EXPECT_ERROR([&] { optimizer->finish_gather(*net_->layers[0]); }, missing);
    EXPECT_ERROR([&] { save_weights(::testing::TempDir() + "never", *net_); }, missing);
  }
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
