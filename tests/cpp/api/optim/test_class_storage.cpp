// SPDX-License-Identifier: BSD-3-Clause
// The storage options of every class: states of any dtype, remainders, stochastic rounding.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/masters.h>

#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "all_classes.h"
#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): all helpers
using torch::optim::OptimizerParamGroup;

template <class Options>
Options remainders() {
  return all_states<Options>().weight_decay(0.1).master_weights(true).store_param_remainders(true);
}

template <class Type>
class StorageOptions : public ::testing::Test {
 public:
  using Optimizer = typename Type::Optimizer;
  using Options = typename Type::Options;
};
TYPED_TEST_SUITE(StorageOptions, testing::AllClasses, testing::ClassNames);

TYPED_TEST(StorageOptions, StatesHaveTheirDtypeWhateverTheParameters) {
  using Options = typename TypeParam::Options;
  for (const auto dtype : {torch::kFloat, torch::kHalf}) {
    const auto params = make_params(dtype);
    typename TypeParam::Optimizer optimizer(params,
                                            all_states<Options>().state_dtype(torch::kBFloat16));
    run_steps(optimizer, params, 0, 2);
    for (const torch::Tensor& param : params) {
      const auto states = own_states(state_of(optimizer, param));
      ASSERT_FALSE(states.empty());
      for (const auto& [name, tensor] : states) {
        const bool number = name == "exp_avg_norm";  // of the whole tensor
        EXPECT_EQ(tensor.scalar_type(), number ? torch::kFloat : torch::kBFloat16) << name;
      }
    }
  }
}

TYPED_TEST(StorageOptions, AStepRoundsItsStatesOnce) {
  using Options = typename TypeParam::Options;
  const auto params = make_params();
  const auto copies = copy_of(params);
  typename TypeParam::Optimizer narrow(params, all_states<Options>().state_dtype(torch::kBFloat16));
  typename TypeParam::Optimizer wide(copies, all_states<Options>());
  run_steps(narrow, params, 0, 1);
  run_steps(wide, copies, 0, 1);
  // LAMB reads what it stored for the second of its passes.
  if (!std::is_same_v<Options, FusedLAMBOptions>) expect_equal(params, copies);
  for (std::size_t i = 0; i < params.size(); ++i) {
    const auto exact = own_states(state_of(wide, copies[i]));
    for (const auto& [name, tensor] : own_states(state_of(narrow, params[i]))) {
      EXPECT_TRUE(torch::equal(tensor, exact.at(name).to(tensor.scalar_type()))) << name;
    }
  }
}

TYPED_TEST(StorageOptions, RemaindersGiveTheMastersOfFp32MastersAndMayBecomeThem) {
  using Options = typename TypeParam::Options;
  const auto params = make_params(torch::kBFloat16);
  const auto copies = copy_of(params);
  typename TypeParam::Optimizer halves(params, remainders<Options>());
  const auto store_remainders = [&](bool stores) {
    edit_options(halves, [&](Options& options) { options.store_param_remainders(stores); });
  };
  typename TypeParam::Optimizer whole(copies, remainders<Options>().store_param_remainders(false));
  for (int step = 0; step < 12; ++step) {
    const bool changed = step >= 10;
    if (step == 10) store_remainders(false);
    run_steps(halves, params, step, step + 1);
    run_steps(whole, copies, step, step + 1);
    for (std::size_t i = 0; i < params.size(); ++i) {
      auto& state = state_of(halves, params[i]);
      EXPECT_EQ(state.master_param().defined(), changed);
      EXPECT_EQ(state.param_remainder().defined(), !changed);
      EXPECT_FALSE(state_of(whole, copies[i]).param_remainder().defined());
      const torch::Tensor master =
          changed ? state.master_param() : master_of_remainder(params[i], state.param_remainder());
      EXPECT_TRUE(torch::equal(master, state_of(whole, copies[i]).master_param()));
    }
  }
  store_remainders(true);
  run_steps(halves, params, 12, 13);
  EXPECT_FALSE(state_of(halves, params[0]).master_param().defined());
  EXPECT_EQ(state_of(halves, params[0]).param_remainder().scalar_type(), torch::kShort);
}

TYPED_TEST(StorageOptions, StochasticRoundingDependsOnTheSeedAndThePlaceOfTheParameter) {
  using Optimizer = typename TypeParam::Optimizer;
  const auto options = [](std::int64_t seed) {
    return all_states<typename TypeParam::Options>().stochastic_rounding(true).seed(seed);
  };
  const auto run = [&](std::int64_t seed) {
    const auto params = make_params(torch::kBFloat16);
    Optimizer optimizer(params, options(seed));
    run_steps(optimizer, params, 0, 5);
    return params;
  };
  const auto expected = run(3);
  expect_equal(run(3), expected);
  EXPECT_FALSE(torch::equal(run(4)[0], expected[0]));

  // In more groups, and with gradients for the last parameter alone.
  const auto split = make_params(torch::kBFloat16);
  Optimizer whole(split, options(3));
  Optimizer optimizer(in_halves(whole), options(3));
  for (int step = 0; step < 5; ++step) {
    set_grads(split, step);
    for (std::size_t i = 0; i < 4; ++i) split[i].mutable_grad() = torch::Tensor();
    optimizer.step();
  }
  EXPECT_TRUE(torch::equal(split[4], expected[4]));
}

TYPED_TEST(StorageOptions, ArchivesThatDoNotFitAreRefused) {
  using Optimizer = typename TypeParam::Optimizer;
  const auto params = make_params(torch::kBFloat16);
  Optimizer optimizer(params, remainders<typename TypeParam::Options>());
  run_steps(optimizer, params, 0, 1);
  const std::string bytes = saved(optimizer);
  Optimizer other(make_params());
  expect_error([&] { load(other, bytes); },
               "expected param_groups[0] to hold a BFloat16 parameter with store_param_remainders");
  auto& state = state_of(optimizer, params[1]);
  state.param_remainder(state.param_remainder().to(torch::kInt));
  Optimizer restored(copy_of(params));
  const std::string broken = saved(optimizer);
  expect_error([&] { load(restored, broken); },
               place_of(optimizer, params[1]).state_name() +
                   ".param_remainder to have dtype Short for a BFloat16 parameter, got Int");
  EXPECT_TRUE(restored.state().empty());
}

TYPED_TEST(StorageOptions, AnArchiveFromBeforeThemHasTheirDefaults) {
  using Options = typename TypeParam::Options;
  auto entries = entries_of(Options(0.25));
  for (const char* key : {"state_dtype", "store_param_remainders", "stochastic_rounding", "seed"}) {
    EXPECT_EQ(entries.erase(key), 1u) << key;
  }
  entries.erase("exp_avg_dtype");
  entries.erase("exp_avg_sq_dtype");
  Options read = remainders<Options>().seed(3).state_dtype(torch::kHalf);
  read_entries(read, entries);
  EXPECT_EQ(entries_of(read), entries_of(Options(0.25)));
}

TYPED_TEST(StorageOptions, OptionsThatDoNotFitAreRefusedByName) {
  using Options = typename TypeParam::Options;
  const auto refused = [](torch::ScalarType dtype, const Options& options,
                          const std::string& text) {
    expect_error([&] { typename TypeParam::Optimizer optimizer(make_params(dtype), options); },
                 testing::class_name<TypeParam>() + ": " + text);
  };
  refused(torch::kBFloat16, Options().store_param_remainders(true),
          "expected defaults.master_weights to be true with store_param_remainders");
  refused(torch::kFloat, remainders<Options>(),
          "expected param_groups[0] to hold a BFloat16 parameter with store_param_remainders");
  refused(
      torch::kHalf, remainders<Options>(),
      "expected param_groups[0].params[0] to be BFloat16 with store_param_remainders, got Half");
  refused(torch::kBFloat16, Options().stochastic_rounding(true).master_weights(true),
          "expected defaults.master_weights to be false with stochastic_rounding");
  refused(torch::kFloat, Options().stochastic_rounding(true),
          "expected param_groups[0].params[0] to be BFloat16 with stochastic_rounding, got Float");
  refused(torch::kBFloat16, Options().seed(-1), "expected defaults.seed to be at least 0, got -1");
  refused(torch::kFloat, Options().state_dtype(torch::kDouble),
          "expected param_groups[0].state_dtype to be Float, BFloat16 or Half for params[0]");
  refused(torch::kDouble, Options().state_dtype(torch::kFloat),
          "expected param_groups[0].state_dtype to be Double for params[0] of dtype Double");
}

TYPED_TEST(StorageOptions, ASeedHoldsForAllGroups) {
  using Options = typename TypeParam::Options;
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<torch::Tensor>{make_params(torch::kBFloat16)[0]},
                      std::make_unique<Options>(Options().seed(2)));
  expect_error([&] { typename TypeParam::Optimizer optimizer(groups, Options()); },
               "expected param_groups[0].seed to equal the optimizer's own");
}

template <class Type>
class MomentDtypes : public ::testing::Test {};
TYPED_TEST_SUITE(MomentDtypes, testing::ClassesWithMoments, testing::ClassNames);

TYPED_TEST(MomentDtypes, EachMomentHasTheDtypeOfItsOption) {
  using Options = typename TypeParam::Options;
  Options options = all_states<Options>().state_dtype(torch::kHalf).exp_avg_dtype(torch::kBFloat16);
  if constexpr (requires { options.exp_avg_sq_dtype(); }) options.exp_avg_sq_dtype(torch::kFloat);
  const auto params = make_params(torch::kBFloat16);
  typename TypeParam::Optimizer optimizer(params, options);
  run_steps(optimizer, params, 0, 2);
  const auto copies = copy_of(params);
  typename TypeParam::Optimizer restored(copies);
  load(restored, saved(optimizer));
  EXPECT_EQ(entries_of(options_of(restored)), entries_of(options));
  expect_same_state(state_of(restored, copies[0]), state_of(optimizer, params[0]));
  const auto states = own_states(state_of(restored, copies[0]));
  EXPECT_EQ(states.at("exp_avg").scalar_type(), torch::kBFloat16);
  for (const char* name : {"exp_avg_sq", "max_exp_avg_sq"}) {
    if (states.count(name) == 0) continue;
    EXPECT_EQ(states.at(name).scalar_type(), torch::kFloat) << name;
  }
  expect_error(
      [&] { typename TypeParam::Optimizer(params, options.exp_avg_dtype(at::kDouble)); },
      "expected param_groups[0].exp_avg_dtype to be Float, BFloat16 or Half for params[0]");
}

}  // namespace
}  // namespace torchfuse::optim
