// SPDX-License-Identifier: BSD-3-Clause
// The options and states of every class: setters, ranges, comparisons, schedulers. Steps of every
// class: under a scaler, skipped, of states that lack a tensor. Then what one class alone has.
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
  for (const torch::Tensor& param : {params[0], params[1]}) {
    const State& state = state_of(optimizer, param);
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
    const bool is_decay = std::is_same_v<Options, FusedMuonOptions>;
    refused(Options().momentum(nan), is_decay ? "momentum to be at least 0 and less than 1, got nan"
                                              : "momentum to be at least 0 and finite");
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
  const auto before = copy_of(params);
  set_grads(params, 1);
  for (const torch::Tensor& param : {params[0], params[1]}) {
    State& state = state_of(optimizer, param);
    const auto whole = entries_of(state);
    std::vector<std::string> names{"step"};
    for (const auto& entry : own_states(state)) names.push_back(entry.first);
    for (const std::string& name : names) {
      // What an option asks for is made when it is wanted.
      const bool late =
          name == "max_exp_avg_sq" || (std::is_same_v<State, FusedSGDParamState> && name != "step");
      if (late) continue;
      auto entries = whole;
      entries.erase(name);
      read_entries(state, entries);
      expect_error(
          [&] { optimizer.step(); },
          c10::str(class_name<TypeParam>(), ": expected the state of a parameter of sizes ",
                   param.sizes(), " to have all of step"));
      expect_equal(params, before);
    }
    read_entries(state, whole);
  }
  optimizer.step();
  EXPECT_EQ(state_of(optimizer, params[1]).step().template item<float>(), 2.0f);
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

/// FusedSGD beside torch's, which counts by the buffer, too. Dampening shows which step is a
/// buffer's first.
struct BesideTorch {
  void set_momentum(double value) {
    options_of(optimizer).momentum(value);
    static_cast<torch::optim::SGDOptions&>(reference.param_groups()[0].options()).momentum(value);
  }
  void run(int first, int last) {
    run_steps(optimizer, params, first, last);
    run_steps(reference, expected, first, last);
  }
  /// One that makes a buffer and leaves it without an update.
  void skip_a_step() {
    set_grads(params, 0);
    params[4].grad().view(-1)[209] = std::numeric_limits<float>::infinity();
    optimizer.step();
  }

  std::vector<torch::Tensor> params = make_params();
  std::vector<torch::Tensor> expected = copy_of(params);
  FusedSGD optimizer{params, FusedSGDOptions(1e-3).dampening(0.5).skip_non_finite(true)};
  torch::optim::SGD reference{expected, torch::optim::SGDOptions(1e-3).dampening(0.5)};
};

TEST(FusedSGD, ABufferThatComesLateHasAFirstStepOfItsOwn) {
  BesideTorch sgd;
  sgd.run(0, 3);
  EXPECT_FALSE(state_of(sgd.optimizer, sgd.params[0]).momentum_buffer().defined());
  for (const double momentum : {0.9, 0.0, 0.9}) {  // the last finds the buffer of the first
    sgd.set_momentum(momentum);
    sgd.run(3, 6);
    expect_close(sgd.params, sgd.expected);
  }
}

TEST(FusedSGD, ALaterBufferHasAFirstUpdateAndLeavesTheCount) {
  BesideTorch sgd;
  sgd.run(0, 3);
  sgd.set_momentum(0.9);
  sgd.skip_a_step();
  const auto copies = copy_of(sgd.params);
  FusedSGD loaded(copies);
  load(loaded, saved(sgd.optimizer));
  sgd.run(3, 6);
  expect_close(sgd.params, sgd.expected);
  run_steps(loaded, copies, 3, 6);
  expect_equal(copies, sgd.params);
  for (const auto& state : {state_of(sgd.optimizer, sgd.params[0]), state_of(loaded, copies[0])}) {
    EXPECT_EQ(state.step().item<float>(), 6.0f);
    EXPECT_EQ(state.momentum_start().item<float>(), 3.0f);
  }
}

TEST(FusedSGD, AMomentumThatPausesBeforeTheFirstUpdate) {
  BesideTorch sgd;
  options_of(sgd.optimizer).momentum(0.9);
  sgd.skip_a_step();
  for (const double momentum : {0.0, 0.9}) {
    sgd.set_momentum(momentum);
    sgd.run(0, 2);
  }
  expect_close(sgd.params, sgd.expected);
}

TEST(FusedSGDOptions, AScheduleMayEndTheMomentum) {
  const auto params = make_params();
  FusedSGD optimizer(params, FusedSGDOptions().momentum(0.9).nesterov(true));
  for (const auto& param : params) param.mutable_grad() = torch::ones_like(param);
  optimizer.step();
  options_of(optimizer).momentum(0.0);
  optimizer.step();
  FusedSGD loaded(make_params(), FusedSGDOptions().momentum(0.9).nesterov(true));
  loaded.load_state_dict(optimizer.state_dict());
  EXPECT_EQ(options_of(loaded).momentum(), 0.0);
}

}  // namespace
}  // namespace torchfuse::optim
