// SPDX-License-Identifier: BSD-3-Clause
// Averages beside any optimizer, against their formulas in double precision.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/checkpoint.h>
#include <torchfuse/nn/sync_batch_norm.h>
#include <torchfuse/optim/averaged_model.h>

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using testing::expect_error;

struct SmallImpl : torch::nn::Cloneable<SmallImpl> {
  SmallImpl() { SmallImpl::reset(); }
  void reset() override {
    fc = register_module("fc", torch::nn::Linear(2, 3));
    bn = register_module("bn", torch::nn::BatchNorm1d(3));
    scale = register_buffer("scale", torch::ones({1}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return bn(fc(x)) * scale; }
  torch::nn::Linear fc{nullptr};
  torch::nn::BatchNorm1d bn{nullptr};
  torch::Tensor scale;
};
TORCH_MODULE(Small);

void set_weights(Small& model, double value) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) parameter.fill_(value);
  model->scale.fill_(10 * value);
  model->bn->num_batches_tracked.fill_(static_cast<std::int64_t>(value));
}

double weight_of(const AveragedModel& averaged) {
  return averaged.module()->as<SmallImpl>()->fc->weight[0][0].item<double>();
}

double scale_of(const AveragedModel& averaged) {
  return averaged.module()->as<SmallImpl>()->scale.item<double>();
}

TEST(AveragedModel, ExponentialAveragesFollowTheFormula) {
  Small model;
  AveragedModel averaged(*model, AveragedModelOptions().decay(0.75));
  averaged.module()->to(torch::kFloat64);
  double expected = 0;
  for (int step = 1; step <= 5; ++step) {
    set_weights(model, step * step);
    averaged.update_parameters(*model);
    expected = step == 1 ? 1 : 0.75 * expected + 0.25 * step * step;
    EXPECT_DOUBLE_EQ(weight_of(averaged), expected);
    EXPECT_EQ(scale_of(averaged), 10.0 * step * step);  // of the last update
    EXPECT_EQ(averaged.n_averaged(), step);
  }
}

TEST(AveragedModel, WithoutDecayAllUpdatesCountAlike) {
  Small model;
  AveragedModel averaged(*model, AveragedModelOptions().use_buffers(true));
  averaged.module()->to(torch::kFloat64);
  double sum = 0;
  for (int step = 1; step <= 7; ++step) {
    set_weights(model, step * step);
    averaged.update_parameters(*model);
    sum += step * step;
    EXPECT_NEAR(weight_of(averaged), sum / step, 1e-14 * sum);
    EXPECT_NEAR(scale_of(averaged), 10 * sum / step, 1e-13 * sum);
  }
  // A count has no average.
  EXPECT_EQ(averaged.module()->as<SmallImpl>()->bn->num_batches_tracked.item<std::int64_t>(), 49);
}

TEST(AveragedModel, WideAveragesOfNarrowWeightsLoseNothing) {
  Small model;
  model->to(torch::kBFloat16);
  AveragedModel averaged(*model, AveragedModelOptions().decay(0.999));
  averaged.to(torch::kFloat32);  // converts the count too
  set_weights(model, 1);
  averaged.update_parameters(*model);
  set_weights(model, 2);
  averaged.update_parameters(*model);
  EXPECT_NEAR(weight_of(averaged), 1.001, 1e-7);  // bf16 has 1 or 1.0078
  EXPECT_EQ(averaged.n_averaged(), 2);
  EXPECT_EQ(averaged.named_buffers()["n_averaged"].scalar_type(), torch::kInt64);
}

/// A layer under two names, and a child that is no Cloneable.
struct TwiceImpl : torch::nn::Cloneable<TwiceImpl> {
  TwiceImpl() { TwiceImpl::reset(); }
  void reset() override {
    norm = register_module("norm", torch::nn::BatchNorm1d(2));
    register_module("again", norm);
    plain = register_module("plain", std::make_shared<torch::nn::Module>());
    plain->register_parameter("weight", torch::randn({2}));
  }
  torch::nn::BatchNorm1d norm{nullptr};
  std::shared_ptr<torch::nn::Module> plain;
};
TORCH_MODULE(Twice);

TEST(AveragedModel, WhatHasTwoNamesIsAveragedOnce) {
  Twice model;
  model->to(torch::kFloat64);
  AveragedModel averaged(*model, AveragedModelOptions().decay(0.5));
  const torch::NoGradGuard no_grad;
  for (const double value : {0.0, 1.0}) {
    for (auto& parameter : model->parameters()) parameter.fill_(value);
    averaged.update_parameters(*model);
  }
  for (const auto& item : averaged.named_parameters()) {
    EXPECT_TRUE(torch::equal(item.value(), torch::full({2}, 0.5, torch::kFloat64))) << item.key();
  }
}

TEST(AveragedModel, ItIsACopyOfTheModelsValuesAndDrawsNoRandomNumbers) {
  torch::manual_seed(1);
  Twice model;
  model->to(torch::kFloat64);
  model->plain->parameters()[0].set_requires_grad(false);
  torch::manual_seed(4);
  const torch::Tensor next = torch::rand({2});
  torch::manual_seed(4);
  const AveragedModel averaged(*model);
  EXPECT_TRUE(torch::equal(torch::rand({2}), next));
  const auto& copy = *averaged.module()->as<TwiceImpl>();
  EXPECT_TRUE(torch::equal(copy.plain->parameters()[0], model->plain->parameters()[0]));
  EXPECT_FALSE(copy.plain->parameters()[0].requires_grad());
  EXPECT_TRUE(copy.norm->weight.requires_grad());
  EXPECT_FALSE(copy.norm->weight.is_alias_of(model->norm->weight));
}

TEST(AveragedModel, CheckpointsHoldItUnderPythonsNames) {
  const std::string path = ::testing::TempDir() + "torchfuse-averaged.pt";
  Small model;
  AveragedModel averaged(*model);
  averaged.update_parameters(*model);
  set_weights(model, 3);
  averaged.update_parameters(*model);
  std::vector<std::string> names;
  for (const auto& item : averaged.named_buffers()) names.push_back(item.key());
  EXPECT_EQ(names[0], "n_averaged");
  EXPECT_EQ(averaged.named_parameters()[0].key(), "module.fc.weight");
  save_checkpoint(path, Checkpoint().model(averaged, "averaged"));
  AveragedModel other(*model);
  load_checkpoint(path, Checkpoint().model(other, "averaged"));
  EXPECT_EQ(other.n_averaged(), 2);
  EXPECT_EQ(weight_of(other), weight_of(averaged));
  std::remove(path.c_str());
}

TEST(AveragedModel, OtherModelsAndDecaysAreRefused) {
  Small model;
  for (const double decay : {1.5, std::nan("")}) {
    expect_error([&] { AveragedModel(*model, AveragedModelOptions().decay(decay)); },
                 "expected decay to be from 0 to 1, got ");
  }
  torch::nn::Module plain;
  expect_error([&] { AveragedModel{plain}; }, "expected a model that can be cloned");
  AveragedModel averaged(*model);
  averaged.update_parameters(*model);
  const double before = weight_of(averaged);
  torch::nn::Linear linear(2, 3);
  expect_error([&] { averaged.update_parameters(*linear); },
               "AveragedModel: expected a model with 4 parameters, like the copied model, got 2.");
  Small other;
  other->fc->weight.set_data(torch::zeros({3, 5}));
  expect_error([&] { averaged.update_parameters(*other); },
               "expected parameters[0] to be fc.weight of sizes [3, 2], as in the copied model, "
               "got fc.weight of sizes [3, 5].");
  EXPECT_EQ(weight_of(averaged), before);
  EXPECT_EQ(averaged.n_averaged(), 1);
}

TEST(UpdateBn, StatisticsAreThoseOfAllBatches) {
  torch::manual_seed(2);
  torch::nn::Sequential model(torch::nn::BatchNorm1d(3), nn::SyncBatchNorm(3));
  model->eval();
  model[0]->train();
  std::vector<torch::Tensor> batches;
  for (int batch = 0; batch < 4; ++batch) batches.push_back(torch::randn({8, 3}) + batch);
  update_bn(batches, *model, [&](const torch::Tensor& batch) {
    EXPECT_FALSE(torch::GradMode::is_enabled());
    EXPECT_TRUE(model[1]->is_training());
    model->forward(batch);
  });
  const auto& norm = *model[0]->as<torch::nn::BatchNorm1dImpl>();
  const auto& sync = *model[1]->as<nn::SyncBatchNormImpl>();
  const torch::Tensor all = torch::stack(batches).to(torch::kFloat64);
  const torch::Tensor mean = all.mean(1).mean(0);
  const torch::Tensor var = all.var(1).mean(0);
  EXPECT_TRUE(torch::allclose(norm.running_mean.to(torch::kFloat64), mean, 1e-6, 1e-6));
  EXPECT_TRUE(torch::allclose(norm.running_var.to(torch::kFloat64), var, 1e-6, 1e-6));
  EXPECT_EQ(sync.num_batches_tracked.item<std::int64_t>(), 4);
  EXPECT_EQ(norm.options.momentum(), 0.1);
  EXPECT_EQ(sync.options.momentum(), 0.1);
  EXPECT_FALSE(model->is_training());
  EXPECT_TRUE(model[0]->is_training());
  EXPECT_FALSE(model[1]->is_training());
}

TEST(UpdateBn, ALayerUnderTwoNamesKeepsItsMomentum) {
  Twice model;
  const std::vector<torch::Tensor> batches{torch::randn({4, 2})};
  update_bn(batches, *model, [&](const torch::Tensor& batch) { model->norm(batch); });
  EXPECT_EQ(model->norm->options.momentum(), 0.1);
}

TEST(UpdateBn, AnErrorLeavesModesAndMomentaAndNothingIsReadWithoutNeed) {
  torch::nn::Sequential model(torch::nn::BatchNorm1d(3));
  model->eval();
  const std::vector<int> batches{1};
  EXPECT_THROW(update_bn(batches, *model, [](int) { throw std::runtime_error("no batch"); }),
               std::runtime_error);
  EXPECT_FALSE(model->is_training());
  EXPECT_EQ(model[0]->as<torch::nn::BatchNorm1dImpl>()->options.momentum(), 0.1);
  torch::nn::Linear linear(2, 2);
  update_bn(batches, *linear, [](int) { FAIL() << "a batch was read"; });
}

}  // namespace
}  // namespace torchfuse::optim
