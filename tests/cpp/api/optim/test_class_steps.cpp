// SPDX-License-Identifier: BSD-3-Clause
// The options and states of every class: setters, ranges, comparisons, schedulers. Steps of every
// class: under a scaler, skipped, of states that lack a tensor. Then what one class alone has;
// FusedSGD's buffer is in test_fused_sgd.cpp.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/torchfuse.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "all_classes.h"
#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): all helpers

template <class Type>
class ClassOptions : public ::testing::Test {};
TYPED_TEST_SUITE(ClassOptions, testing::AllClasses, testing::ClassNames);

TYPED_TEST(ClassOptions, SettersReturnTheClassItself) {
  using Options = typename TypeParam::Options;
  Options options;
  static_assert(std::is_same_v<decltype(options.lr(1.0).seed(2)), Options&>);
  static_assert(std::is_same_v<decltype(typename TypeParam::State().step(torch::Tensor())),
                               typename TypeParam::State&>);
  EXPECT_EQ(&options.lr(1.0).max_grad_norm(2.0).state_dtype(torch::kHalf), &options);
  const torch::optim::OptimizerOptions& base = options;
  const auto copy = base.clone();
  EXPECT_EQ(entries_of(dynamic_cast<const Options&>(*copy)), entries_of(options));
}

TYPED_TEST(ClassOptions, AreEqualIfAllValuesAre) {
  using Options = typename TypeParam::Options;
  const Options defaults;
  EXPECT_TRUE(defaults == Options());
  EXPECT_TRUE(other_options<Options>() == other_options<Options>());
  const auto plain = entries_of(defaults);
  std::size_t changes = 0;
  for (const auto& [key, entry] : entries_of(other_options<Options>())) {
    if (entry == plain.at(key)) continue;
    auto entries = plain;
    entries[key] = entry;
    Options changed;
    read_entries(changed, entries);
    EXPECT_TRUE(changed != defaults) << key;
    ++changes;
  }
  EXPECT_GE(changes, 7u);
  EXPECT_TRUE(Options().seed(1) != defaults);
  EXPECT_TRUE(Options().ema_decay(0.9) != defaults);
  EXPECT_TRUE(Options().state_dtype(at::kBFloat16) != defaults);
}

TYPED_TEST(ClassOptions, StatesAreEqualIfAllTensorsAre) {
  using State = typename TypeParam::State;
  const auto params = make_params();
  typename TypeParam::Optimizer optimizer(params, all_states<typename TypeParam::Options>());
  run_steps(optimizer, params, 0, 1);
  const State& state = state_of(optimizer, params[1]);
  const auto entries = entries_of(state);
  EXPECT_TRUE(state == State(state));
  const torch::optim::OptimizerParamState& base = state;
  const auto clone = base.clone();
  EXPECT_TRUE(dynamic_cast<const State&>(*clone).step().is_same(state.step()));
  EXPECT_TRUE(state != State());
  for (const auto& [key, entry] : entries) {
    const torch::Tensor tensor = entry.toTensor();
    for (const torch::Tensor& other :
         {tensor + 1.0, tensor.to(at::kDouble), tensor.unsqueeze(0), torch::Tensor()}) {
      auto edited = entries;
      edited.erase(key);
      if (other.defined()) edited[key] = other;
      State changed;
      read_entries(changed, edited);
      EXPECT_TRUE(changed != state) << key;
      EXPECT_TRUE(changed == State(changed)) << key;
    }
  }
}

template <class Optimizer>
void expect_refused(const typename Optimizer::options_t& options, const std::string& text) {
  const std::string name = c10::demangle_type<Optimizer>();
  expect_error([&] { Optimizer optimizer(make_params(), options); },
               name.substr(name.rfind(':') + 1) + ": expected defaults." + text);
}

TYPED_TEST(ClassOptions, OutOfRangeValuesAreRefusedByName) {
  using Options = typename TypeParam::Options;
  const auto refused = expect_refused<typename TypeParam::Optimizer>;
  const double nan = std::nan("");
  refused(Options(-1.0), "lr to be at least 0 and finite, got -1");
  refused(Options(nan), "lr to be at least 0 and finite, got nan");
  refused(Options().weight_decay(-0.5), "weight_decay to be at least 0 and finite, got -0.5");
  refused(Options().max_grad_norm(-2.0), "max_grad_norm to be >= 0 or none, got -2");
  if constexpr (requires { Options().betas(); }) {
    refused(Options().betas({1.0, 0.9}), "betas[0] to be at least 0 and less than 1, got 1");
    refused(Options().betas({0.9, nan}), "betas[1] to be at least 0 and less than 1, got nan");
  }
  if constexpr (requires { Options().eps(); }) {
    refused(Options().eps(-1e-8), "eps to be at least 0 and finite");
  }
  if constexpr (requires { Options().momentum(); }) {
    refused(Options().momentum(nan), "momentum to be at least 0 and finite");
  }
}

TEST(ClassOptions, OutOfRangeValuesOfOneClassAreRefusedByName) {
  using LAMB = FusedLAMBOptions;
  using SGD = FusedSGDOptions;
  expect_refused<FusedLAMB>(LAMB().min_trust_ratio(-0.5), "min_trust_ratio to be");
  expect_refused<FusedLAMB>(LAMB().min_trust_ratio(2.0).max_trust_ratio(1.0),
                            "max_trust_ratio to be none or at least min_trust_ratio, 2, got 1");
  expect_refused<FusedNovoGrad>(FusedNovoGradOptions().norm_type(1),
                                "norm_type to be 2 or 0 (the largest magnitude), got 1");
  expect_refused<FusedLARS>(FusedLARSOptions().trust_coefficient(-0.1), "trust_coefficient to be");
  expect_refused<FusedLARS>(FusedLARSOptions().momentum(0.0).nesterov(true),
                            "nesterov to come with a momentum above 0, got 0");
  expect_refused<FusedSGD>(SGD().dampening(-0.1), "dampening to be at least 0 and finite");
  const std::string nesterov =
      "nesterov to come with a momentum above 0 and a dampening of 0, got ";
  expect_refused<FusedSGD>(SGD().nesterov(true), nesterov + "0 and 0");
  expect_refused<FusedSGD>(SGD().nesterov(true).momentum(0.5).dampening(0.25),
                           nesterov + "0.5 and 0.25");
  expect_refused<FusedAdagrad>(FusedAdagradOptions().lr_decay(-0.1),
                               "lr_decay to be at least 0 and finite");
  expect_refused<FusedAdagrad>(FusedAdagradOptions().initial_accumulator_value(-0.5),
                               "initial_accumulator_value to be at least 0 and finite, got -0.5");
}

TYPED_TEST(ClassOptions, AnArchiveWithoutAFieldIsRefusedByName) {
  using Options = typename TypeParam::Options;
  auto entries = entries_of(Options(0.5));
  entries.erase("weight_decay");
  Options options(0.25);
  expect_error(
      [&] { read_entries(options, entries); },
      testing::class_name<TypeParam>() + "Options: expected the archive to hold weight_decay");
  EXPECT_EQ(options.lr(), 0.25);
}

TYPED_TEST(ClassOptions, SchedulersReadAndSetTheLearningRate) {
  typename TypeParam::Options options(0.5);
  EXPECT_EQ(options.get_lr(), 0.5);
  options.set_lr(0.25);
  EXPECT_EQ(options.lr(), 0.25);
  expect_error([&] { options.set_lr(-3.0); }, testing::class_name<TypeParam>() +
                                                  ": expected options.lr to be at least 0 and "
                                                  "finite, got -3");
  EXPECT_EQ(options.get_lr(), 0.25);
}

torch::Tensor loss_of(const std::vector<torch::Tensor>& params) {
  torch::Tensor loss = torch::zeros({});
  for (const auto& param : params) loss = loss + param.square().sum();
  return loss;
}

void overflow(const std::vector<torch::Tensor>& params) {
  params[4].mutable_grad().view(-1)[209] = std::numeric_limits<float>::infinity();
}

template <class Type>
class ClassSteps : public ::testing::Test {};
TYPED_TEST_SUITE(ClassSteps, testing::AllClasses, testing::ClassNames);

TYPED_TEST(ClassSteps, ScaledAndClippedStepsEqualPlainOnes) {
  for (const bool unscale_first : {false, true}) {
    const auto params = make_params();
    const auto copies = copy_of(params);
    auto options = all_states<typename TypeParam::Options>().lr(1e-2).max_grad_norm(1.0);
    typename TypeParam::Optimizer optimizer(params, options);
    typename TypeParam::Optimizer plain(copies, options);
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

TYPED_TEST(ClassSteps, AnOverflowUnderAScalerChangesNothing) {
  using State = typename TypeParam::State;
  for (const bool unscale_first : {false, true}) {
    const auto params = make_params();
    typename TypeParam::Optimizer optimizer(params, all_states<typename TypeParam::Options>());
    amp::GradScaler scaler(torch::kCPU);
    const auto step = [&](bool overflows) {
      optimizer.zero_grad();
      scaler.scale(loss_of(params)).backward();
      if (overflows) overflow(params);
      if (unscale_first) scaler.unscale_(optimizer);
      scaler.step(optimizer);
      scaler.update();
      EXPECT_EQ(optimizer.last_step_skipped().template item<float>(), overflows ? 1.0f : 0.0f);
    };
    step(false);
    const auto before = copy_of(params);
    State state;
    read_entries(state, entries_of(state_of(optimizer, params[0])));
    const double scale = scaler.get_scale();
    step(true);
    expect_equal(params, before);
    expect_same_state(state_of(optimizer, params[0]), state);
    EXPECT_EQ(scaler.get_scale(), scale / 2.0);
    step(false);
    EXPECT_EQ(state_of(optimizer, params[0]).step().template item<float>(), 2.0f);
  }
}

// With options that show which step is a state's first.
TYPED_TEST(ClassSteps, ASkippedFirstStepIsNotTheFirst) {
  auto options = all_states<typename TypeParam::Options>();
  if constexpr (requires { options.dampening(); }) options.dampening(0.5);
  if constexpr (requires { options.initial_accumulator_value(); }) {
    options.initial_accumulator_value(0.5);
  }
  const auto params = make_params();
  const auto expected = copy_of(params);
  typename TypeParam::Optimizer reference(expected, options);
  typename TypeParam::Optimizer optimizer(params, options.skip_non_finite(true));
  set_grads(params, 0);
  overflow(params);
  optimizer.step();
  EXPECT_EQ(optimizer.last_step_skipped().template item<float>(), 1.0f);
  EXPECT_EQ(state_of(optimizer, params[0]).step().template item<float>(), 0.0f);
  run_steps(optimizer, params, 1, 4);
  run_steps(reference, expected, 1, 4);
  expect_equal(params, expected);
}

TYPED_TEST(ClassSteps, AStateThatLacksATensorIsRefused) {
  using State = typename TypeParam::State;
  const auto params = make_params();
  typename TypeParam::Optimizer optimizer(params, all_states<typename TypeParam::Options>());
  run_steps(optimizer, params, 0, 1);
  State& state = state_of(optimizer, params[1]);
  const auto whole = entries_of(state);
  std::vector<std::string> names{"step"};
  for (const auto& entry : own_states(state)) names.push_back(entry.first);
  const auto before = copy_of(params);
  set_grads(params, 1);
  for (const std::string& name : names) {
    // What an option asks for is made when it is wanted.
    const bool late =
        name == "max_exp_avg_sq" || (std::is_same_v<State, FusedSGDParamState> && name != "step");
    if (late) continue;
    auto entries = whole;
    entries.erase(name);
    read_entries(state, entries);
    expect_error([&] { optimizer.step(); },
                 class_name<TypeParam>() +
                     ": expected the state of a parameter of sizes [1] to have all of step");
    expect_equal(params, before);
  }
  read_entries(state, whole);
  optimizer.step();
  EXPECT_EQ(state.step().template item<float>(), 2.0f);
}

// --- What one class alone has --------------------------------------------------------------------

TEST(FusedLARS, TheLocalRateIsOneWhereANormIsZero) {
  const torch::Tensor zeros = torch::zeros({5}).requires_grad_(true);
  const torch::Tensor ones = torch::ones({5}).requires_grad_(true);
  FusedLARS optimizer(std::vector<torch::Tensor>{zeros, ones},
                      FusedLARSOptions(0.5).weight_decay(0.25));
  zeros.mutable_grad() = torch::ones({5});
  ones.mutable_grad() = torch::zeros({5});
  optimizer.step();
  EXPECT_TRUE(torch::equal(zeros, torch::full({5}, -0.5)));
  EXPECT_TRUE(torch::equal(ones, torch::full({5}, 0.875)));
}

TEST(FusedLAMB, AZeroTensorMovesByThePlainUpdate) {
  const torch::Tensor zeros = torch::zeros({5}).requires_grad_(true);
  FusedLAMB optimizer(std::vector<torch::Tensor>{zeros}, FusedLAMBOptions(0.1).eps(0.0));
  zeros.mutable_grad() = torch::full({5}, -0.25);
  optimizer.step();
  testing::expect_close(zeros, torch::full({5}, 0.1));
}

TEST(FusedNovoGrad, TheNumberOfParametersWithGradientsMayChange) {
  const auto params = make_params();
  const auto copies = copy_of(params);
  FusedNovoGrad together(params);
  FusedNovoGrad alone(std::vector<torch::Tensor>{copies[0]});
  for (int i = 0; i < 6; ++i) {
    set_grads(params, i);
    copies[0].mutable_grad() = params[0].grad().clone();
    if (i % 2 == 0) params[3].mutable_grad() = torch::Tensor();
    together.step();
    alone.step();
  }
  EXPECT_TRUE(torch::equal(params[0], copies[0]));
  EXPECT_EQ(state_of(together, params[3]).step().item<float>(), 3.0f);
}

TEST(FusedNovoGrad, AnArchivesNormThatIsNoNumberOfTheParametersTypeIsRefused) {
  for (const torch::Tensor& norm :
       {torch::ones({37, 5}), torch::ones({}, torch::kDouble), torch::ones({1})}) {
    const auto params = make_params();
    FusedNovoGrad optimizer(params);
    run_steps(optimizer, params, 0, 2);
    state_of(optimizer, params[0]).exp_avg_norm(norm);
    const std::string bytes = saved(optimizer);
    FusedNovoGrad other(copy_of(params));
    expect_error([&] { load(other, bytes); },
                 "expected the archive's param_groups[0].state[0].exp_avg_norm to be a 0-dim Float "
                 "tensor for a Float parameter, got a " +
                     std::to_string(norm.dim()) + "-dim ");
    EXPECT_TRUE(other.state().empty());
  }
}

}  // namespace
}  // namespace torchfuse::optim
