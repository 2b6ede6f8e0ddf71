// SPDX-License-Identifier: BSD-3-Clause
// What a gather that fails, or that an exception ends, leaves to those who use the parameters next.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/optim/averaged_model.h>
#include <torchfuse/parallel/sharded_optimizer.h>
#include <torchfuse/weights.h>

#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>

#include "gather_testing.h"
#include "parallel_testing.h"
#include "sharded_testing.h"

namespace torchfuse::sharded_testing {
namespace {

using testing::error_of;

constexpr const char* kMixed = "the model has parameters of different steps";

class FailedGathers : public LateParameters {
 protected:
  void SetUp() override {
    LateParameters::SetUp();
    const torch::NoGradGuard no_grad;
    for (const torch::Tensor& param : net_->parameters()) param.fill_(7);
    save_weights(path_, *net_);
  }
  void TearDown() override {
    std::filesystem::remove(path_);
    LateParameters::TearDown();
  }

  /// An optimizer whose second step is under way: the first layer's message arrives, the second's
  /// fails.
  std::unique_ptr<ShardedAdam> failed_optimizer() {
    auto optimizer = make_optimizer();
    step(*optimizer, 1);
    late_->failure = kClosed;
    // Those of the third layer, for which the step waits, and of the first.
    late_->messages_before_failure = 2;
    step_with_all_under_way(*optimizer, 2);
    return optimizer;
  }

  static constexpr const char* kClosed = "Connection closed by peer";
  std::string path_ = ::testing::TempDir() + "failed_gathers.safetensors";
};

TEST_F(FailedGathers, ThatWereNotBegunFailAgain) {
  auto optimizer = make_optimizer();
  step(*optimizer, 1);
  late_->refusal = {3, "no memory for the message"};  // of the other part of the first layer
  EXPECT_ERROR([&] { step_with_all_under_way(*optimizer, 2); }, "got in rank 0: no memory");
  late_->refusal.reset();
  EXPECT_EQ(biases(), Biases({1, 1, 2})) << "what was begun has arrived, and nothing else";
  for (const auto& work : late_->begun) EXPECT_TRUE(work->isCompleted());
  EXPECT_ERROR([&] { save_weights(path_, *net_); }, "got in rank 0: no memory");
  EXPECT_ERROR([&] { optimizer->finish_gather(*net_->layers[1]); }, "got in rank 0: no memory");
  EXPECT_ERROR([&] { step(*optimizer, 3); }, "got in rank 0: no memory");
  EXPECT_EQ(biases(), Biases({1, 1, 2}));
}

TEST_F(FailedGathers, LetTheOthersArrive) {
  auto optimizer = failed_optimizer();
  EXPECT_EQ(biases(), Biases({1, 1, 2}));
  EXPECT_ERROR([&] { optimizer->finish_gather(); }, kClosed);
  EXPECT_EQ(biases(), Biases({2, 1, 2}));
  EXPECT_ERROR([&] { const optim::AveragedModel averaged(*net_->layers[1]); }, kClosed);
}

TEST_F(FailedGathers, OfOnePartLetTheOtherPartArrive) {
  const auto optimizer = make_optimizer();
  step(*optimizer, 1);
  late_->failure = kClosed;
  late_->failing = 0;
  EXPECT_ERROR([&] { step_with_all_under_way(*optimizer, 2); }, kClosed);
  EXPECT_EQ(biases(), Biases({1, 1, 2}));
  EXPECT_ERROR([&] { optimizer->finish_gather(); }, kClosed);
  EXPECT_EQ(biases(), Biases({2, 2, 2}));
}

TEST_F(FailedGathers, LetTheModelBeLoaded) {
  auto optimizer = failed_optimizer();
  load_weights(path_, *net_);
  EXPECT_EQ(biases(), Biases({7, 7, 7}));
  EXPECT_ERROR([&] { step(*optimizer, 3); }, kClosed);
  EXPECT_ERROR([&] { make_optimizer(); }, kClosed);
  Warnings warnings;
  {
    const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
    optimizer.reset();
  }
  ASSERT_EQ(warnings.texts.size(), 1);
  EXPECT_PRED_FORMAT2(::testing::IsSubstring, kMixed, warnings.texts[0]);
  EXPECT_EQ(biases(), Biases({7, 7, 7})) << "nothing arrives after the load";
  late_->failure.clear();
  step(*make_optimizer(), 3);
  EXPECT_EQ(biases(), Biases({3, 3, 3}));
}

/// The data-parallel model keeps what the optimizer had.
TEST_F(FailedGathers, OfSplitGradientsAreForgottenWithTheirOptimizer) {
  WaitingModel model(net_, group_);
  auto optimizer = std::make_unique<ShardedAdam>(net_->parameters(), optim::FusedAdamOptions(),
                                                 model, net_->modules({0, 1, 2}));
  for (const auto& layer : net_->layers) optimizer->finish_gather(*layer);
  late_->failure = kClosed;
  optimizer->step();
  EXPECT_ERROR([&] { save_weights(path_, *net_); }, kClosed);
  optimizer.reset();
  load_weights(path_, *net_);
  save_weights(path_, *net_);
  EXPECT_EQ(biases(), Biases({7, 7, 7}));
}

TEST_F(FailedGathers, ThatAnExceptionEndedArriveBeforeTheModelIsUsed) {
  const auto fail = [&](float value) {
    const auto optimizer = make_optimizer();
    step(*optimizer, value - 1);
    step_with_all_under_way(*optimizer, value);
    throw std::runtime_error("the data has ended");
  };
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  EXPECT_THROW(fail(2), std::runtime_error);
  EXPECT_EQ(biases(), Biases({1, 1, 2}));
  const optim::AveragedModel averaged(*net_->layers[0]);
  EXPECT_EQ(biases(), Biases({2, 1, 2})) << "of each layer, who uses it waits";
  const optim::AveragedModel another(*net_->layers[1]);
  EXPECT_EQ(biases(), Biases({2, 2, 2}));
  EXPECT_THROW(fail(4), std::runtime_error);
  load_weights(path_, *net_);
  EXPECT_EQ(biases(), Biases({7, 7, 7}));
  step(*make_optimizer(), 5);
  EXPECT_EQ(biases(), Biases({5, 5, 5})) << "nothing arrives late";
}

TEST_F(FailedGathers, AreWarnedOfIfAnExceptionComesAfterThem) {
  late_->ends_at_once = true;
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  const auto fail = [&] {
    const auto optimizer = failed_optimizer();
    optimizer->finish_gather(*net_->layers[0]);  // the others have ended, too
    throw std::runtime_error("the loss is not a number");
  };
  EXPECT_THROW(fail(), std::runtime_error);
  ASSERT_EQ(warnings.texts.size(), 1);
  EXPECT_PRED_FORMAT2(::testing::IsSubstring, kMixed, warnings.texts[0]);
}

TEST_F(FailedGathers, AreNotThoseOfCopies) {
  const auto optimizer = failed_optimizer();
  for (const auto& layer : net_->layers) {
    EXPECT_NO_THROW(optimizer->finish_gather(*layer->clone()));
  }
}

}  // namespace
}  // namespace torchfuse::sharded_testing
