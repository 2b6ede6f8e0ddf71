// SPDX-License-Identifier: BSD-3-Clause
// The options and states of every class: setters, ranges, comparisons, schedulers.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstddef>
#include <string>
#include <type_traits>

#include "all_classes.h"
#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using testing::all_states;
using testing::entries_of;
using testing::expect_error;
using testing::make_params;
using testing::other_options;
using testing::read_entries;
using testing::run_steps;
using testing::state_of;

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

TYPED_TEST(ClassOptions, OutOfRangeValuesAreRefusedByName) {
  using Options = typename TypeParam::Options;
  const auto refused = [](const Options& options, const std::string& text) {
    expect_error([&] { typename TypeParam::Optimizer optimizer(make_params(), options); },
                 testing::class_name<TypeParam>() + ": expected defaults." + text);
  };
  refused(Options(-1.0), "lr to be at least 0 and finite, got -1");
  refused(Options(std::nan("")), "lr to be at least 0 and finite, got nan");
  refused(Options().weight_decay(-0.5), "weight_decay to be at least 0 and finite, got -0.5");
  refused(Options().max_grad_norm(-2.0), "max_grad_norm to be >= 0 or none, got -2");
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

}  // namespace
}  // namespace torchfuse::optim
