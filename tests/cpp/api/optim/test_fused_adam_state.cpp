// SPDX-License-Identifier: BSD-3-Clause
// FusedAdam's options, its errors, and its steps under a loss scaler.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <torchfuse/amp/grad_scaler.h>
#include <torchfuse/optim/fused_adam.h>

#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using testing::copy_of;
using testing::expect_equal;
using testing::expect_error;
using testing::make_params;
using testing::run_steps;
using testing::set_grads;
using testing::state_of;
using torch::optim::OptimizerParamGroup;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(FusedAdamOptions, ArchiveWithoutAFieldIsRefusedByName) {
  torch::serialize::OutputArchive archive;
  archive.write("lr", c10::IValue(0.5));
  std::ostringstream stream;
  archive.save_to(stream);
  std::istringstream input(stream.str());
  torch::serialize::InputArchive loaded;
  loaded.load_from(input);
  FusedAdamOptions options(0.25);
  expect_error([&] { options.serialize(loaded); },
               "FusedAdamOptions: expected the archive to hold betas");
  EXPECT_EQ(options.lr(), 0.25);
}

TEST(FusedAdamOptions, ClonesAreIndependent) {
  FusedAdamOptions options(0.25);
  options.max_grad_norm(2.0).maximize(true);
  const torch::optim::OptimizerOptions& base = options;
  const auto clone = base.clone();
  options.set_lr(0.5);
  const auto& copy = dynamic_cast<const FusedAdamOptions&>(*clone);
  EXPECT_EQ(copy.get_lr(), 0.25);
  EXPECT_EQ(copy.max_grad_norm(), 2.0);
  EXPECT_TRUE(copy.maximize());
}

TEST(FusedAdamParamState, CloneSharesTensors) {
  FusedAdamParamState state;
  state.exp_avg(torch::ones({3}));
  const torch::optim::OptimizerParamState& base = state;
  const auto clone = base.clone();
  EXPECT_TRUE(dynamic_cast<const FusedAdamParamState&>(*clone).exp_avg().is_same(state.exp_avg()));
}

TEST(FusedAdamOptions, OutOfRangeValuesAreRefusedByName) {
  using Options = FusedAdamOptions;
  const auto construct = [](const Options& options) {
    return [options] { FusedAdam optimizer(make_params(), options); };
  };
  expect_error(construct(Options(-1.0)), "defaults.lr to be at least 0 and finite, got -1");
  expect_error(construct(Options(kNan)), "defaults.lr to be at least 0 and finite, got nan");
  expect_error(construct(Options().betas({1.0, 0.9})),
               "defaults.betas[0] to be at least 0 and less than 1, got 1");
  expect_error(construct(Options().betas({0.9, kNan})),
               "defaults.betas[1] to be at least 0 and less than 1");
  expect_error(construct(Options().eps(-1e-8)), "defaults.eps to be at least 0 and finite");
  expect_error(construct(Options().weight_decay(-0.5)), "defaults.weight_decay to be");
  expect_error(construct(Options().max_grad_norm(-2.0)), "defaults.max_grad_norm to be >= 0");
  Options options(0.5);
  expect_error([&] { options.set_lr(-3.0); }, "options.lr to be at least 0 and finite, got -3");
  EXPECT_EQ(options.lr(), 0.5);
}

TEST(FusedAdam, NamesTheGroupWithBadOptionsAndWorksAfterwards) {
  const auto params = make_params();
  FusedAdam optimizer(std::vector<torch::Tensor>{params[0]});
  run_steps(optimizer, params, 0, 1);
  optimizer.add_param_group(OptimizerParamGroup(
      {params[1]}, std::make_unique<FusedAdamOptions>(FusedAdamOptions().eps(kNan))));
  const auto before = copy_of(params);
  expect_error([&] { optimizer.step(); },
               "param_groups[1].eps to be at least 0 and finite, got nan");
  expect_equal(params, before);

  auto& options = static_cast<FusedAdamOptions&>(optimizer.param_groups()[1].options());
  options.eps(1e-8).max_grad_norm(1.0);
  expect_error([&] { optimizer.step(); },
               "param_groups[1].max_grad_norm to equal the optimizer's own");
  options.max_grad_norm(std::nullopt);
  run_steps(optimizer, params, 1, 2);
  EXPECT_FALSE(torch::equal(params[1], before[1]));
}

TEST(FusedAdam, RefusesWhatCannotBeAParameterGroup) {
  const auto params = make_params();
  expect_error([&] { FusedAdam optimizer({params[0], torch::Tensor()}); },
               "param_groups[0].params[1] to be a tensor, got an undefined one");
  std::vector<OptimizerParamGroup> foreign;
  foreign.emplace_back(params, std::make_unique<torch::optim::SGDOptions>(0.1));
  expect_error([&] { FusedAdam optimizer(foreign); },
               "param_groups[0].options to be FusedAdamOptions");
  FusedAdam twice(std::vector<torch::Tensor>{params[0], params[0]});
  set_grads(params, 0);
  expect_error([&] { twice.step(); },
               "param_groups[0].params[1] to be in the parameter groups once");
  EXPECT_TRUE(twice.state().empty());
}

TEST(FusedAdam, RefusedGradientsLeaveEverythingAsItWas) {
  const auto params = make_params();
  FusedAdam optimizer(params);
  run_steps(optimizer, params, 0, 1);
  const auto before = copy_of(params);
  set_grads(params, 1);
  params[0].mutable_grad() = params[0].grad().to_sparse();
  EXPECT_THROW(optimizer.step(), c10::Error);
  expect_equal(params, before);
  EXPECT_EQ(state_of(optimizer, params[1]).step().item<float>(), 1.0f);
  run_steps(optimizer, params, 1, 2);
  EXPECT_EQ(state_of(optimizer, params[1]).step().item<float>(), 2.0f);
}

class DrivenFusedAdam : public FusedAdam {
 public:
  using FusedAdam::FusedAdam;
  using FusedOptimizer::scaling_;
};

TEST(FusedAdam, RefusesAClosureUnderAScaler) {
  DrivenFusedAdam optimizer(make_params());
  optimizer.scaling_ = ScalingRequest{};
  expect_error([&] { optimizer.step([] { return torch::zeros({}); }); },
               "Closure use is not currently supported if GradScaler is enabled.");
}

torch::Tensor loss_of(const std::vector<torch::Tensor>& params) {
  torch::Tensor loss = torch::zeros({});
  for (const auto& param : params) loss = loss + param.square().sum();
  return loss;
}

TEST(FusedAdam, ScaledStepsEqualUnscaledOnes) {
  for (const bool unscale_first : {false, true}) {
    const auto params = make_params();
    const auto copies = copy_of(params);
    FusedAdam optimizer(params, FusedAdamOptions(1e-2).max_grad_norm(1.0));
    FusedAdam plain(copies, FusedAdamOptions(1e-2).max_grad_norm(1.0));
    amp::GradScaler scaler(torch::kCPU);
    for (int i = 0; i < 5; ++i) {
      optimizer.zero_grad();
      scaler.scale(loss_of(params)).backward();
      if (unscale_first) scaler.unscale_(optimizer);
      scaler.step(optimizer);
      scaler.update();
      plain.zero_grad();
      loss_of(copies).backward();
      plain.step();
    }
    expect_equal(params, copies);
    EXPECT_TRUE(torch::equal(optimizer.grad_norm(), plain.grad_norm()));
  }
}

TEST(FusedAdam, OverflowUnderAScalerChangesNothing) {
  for (const bool unscale_first : {false, true}) {
    const auto params = make_params();
    FusedAdam optimizer(params, FusedAdamOptions(1e-2));
    amp::GradScaler scaler(torch::kCPU);
    const auto step = [&](bool overflow) {
      optimizer.zero_grad();
      scaler.scale(loss_of(params)).backward();
      if (overflow) params[3].grad()[128] = std::numeric_limits<float>::infinity();
      if (unscale_first) scaler.unscale_(optimizer);
      scaler.step(optimizer);
      scaler.update();
    };
    step(false);
    const auto before = copy_of(params);
    const torch::Tensor moment = state_of(optimizer, params[0]).exp_avg().clone();
    const double scale = scaler.get_scale();
    step(true);
    expect_equal(params, before);
    EXPECT_TRUE(torch::equal(state_of(optimizer, params[0]).exp_avg(), moment));
    EXPECT_EQ(state_of(optimizer, params[0]).step().item<float>(), 1.0f);
    EXPECT_EQ(optimizer.last_step_skipped().item<float>(), 1.0f);
    EXPECT_EQ(scaler.get_scale(), scale / 2.0);
    step(false);
    EXPECT_EQ(state_of(optimizer, params[0]).step().item<float>(), 2.0f);
    EXPECT_EQ(optimizer.last_step_skipped().item<float>(), 0.0f);
  }
}

}  // namespace
}  // namespace torchfuse::optim
