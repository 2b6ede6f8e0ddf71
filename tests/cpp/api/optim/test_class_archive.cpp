// SPDX-License-Identifier: BSD-3-Clause
// Archives of every class: exact round trips, and refusals that leave the optimizer as it was.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "all_classes.h"
#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using testing::all_states;
using testing::copy_of;
using testing::entries_of;
using testing::expect_equal;
using testing::expect_error;
using testing::expect_same_state;
using testing::load;
using testing::make_params;
using testing::options_of;
using testing::other_options;
using testing::own_states;
using testing::read_entries;
using testing::run_steps;
using testing::saved;
using testing::state_of;
using torch::optim::OptimizerParamGroup;

template <class Type>
class ClassArchive : public ::testing::Test {
 public:
  using Optimizer = typename Type::Optimizer;
  using Options = typename Type::Options;
  using State = typename Type::State;

  /// Loading `bytes` into an optimizer fails with `text` and leaves it as it was.
  static void expect_refused(const std::string& bytes, const std::string& text) {
    const auto params = make_params();
    const auto copies = copy_of(params);
    Optimizer optimizer(params, all_states<Options>());
    Optimizer untouched(copies, all_states<Options>());
    run_steps(optimizer, params, 0, 2);
    run_steps(untouched, copies, 0, 2);
    expect_error([&] { load(optimizer, bytes); }, text);
    run_steps(optimizer, params, 2, 4);
    run_steps(untouched, copies, 2, 4);
    expect_equal(params, copies);
  }

  /// The archive of an optimizer over make_params() after `edit` of its options and of the state
  /// of params[1].
  template <typename Edit>
  static std::string edited_archive(Edit&& edit) {
    const auto params = make_params();
    Optimizer optimizer(params, all_states<Options>());
    run_steps(optimizer, params, 0, 1);
    edit(options_of(optimizer), state_of(optimizer, params[1]));
    return saved(optimizer);
  }

  /// The same with the class's state `name` replaced by what `replace` makes of it, or without it.
  template <typename Replace>
  static std::string archive_with(const std::string& name, Replace&& replace) {
    return edited_archive([&](Options&, State& state) {
      auto entries = entries_of(state);
      const torch::Tensor tensor = replace(entries.at(name).toTensor());
      entries.erase(name);
      if (tensor.defined()) entries[name] = tensor;
      read_entries(state, entries);
    });
  }

  /// The names of the class's states, the longest list that options can ask for.
  static std::vector<std::string> state_names() {
    const auto params = make_params();
    Optimizer optimizer(params, all_states<Options>());
    run_steps(optimizer, params, 0, 1);
    std::vector<std::string> names;
    for (const auto& entry : own_states(state_of(optimizer, params[0]))) {
      names.push_back(entry.first);
    }
    return names;
  }
};
TYPED_TEST_SUITE(ClassArchive, testing::AllClasses, testing::ClassNames);

TYPED_TEST(ClassArchive, RoundTripContinuesBitForBit) {
  using Options = typename TypeParam::Options;
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kDouble}) {
    const auto params = make_params(dtype);
    typename TypeParam::Optimizer optimizer(params, other_options<Options>());
    run_steps(optimizer, params, 0, 5);

    const auto copies = copy_of(params);
    typename TypeParam::Optimizer restored(copies);
    load(restored, saved(optimizer));
    EXPECT_EQ(entries_of(options_of(restored)), entries_of(other_options<Options>()));

    run_steps(optimizer, params, 5, 8);
    run_steps(restored, copies, 5, 8);
    expect_equal(copies, params);
    for (std::size_t i = 0; i < params.size(); ++i) {
      const auto& state = state_of(restored, copies[i]);
      expect_same_state(state, state_of(optimizer, params[i]));
      EXPECT_EQ(state.step().template item<float>(), 8.0f);
      EXPECT_EQ(state.master_param().defined(), dtype == torch::kBFloat16);
    }
  }
}

// So that the round trip shows every option.
TYPED_TEST(ClassArchive, OtherOptionsDifferFromTheDefaults) {
  using Options = typename TypeParam::Options;
  const auto others = entries_of(other_options<Options>());
  for (const auto& [key, entry] : entries_of(Options())) {
    const bool storage = key == "store_param_remainders" || key == "stochastic_rounding" ||
                         key == "seed" || key.ends_with("_dtype");
    const bool excluded = key == "nesterov" && others.count("dampening") == 1;  // by dampening
    if (storage || excluded) continue;
    EXPECT_NE(others.at(key), entry) << key;
  }
}

TYPED_TEST(ClassArchive, SavedBeforeTheFirstStepReplacesStates) {
  using Options = typename TypeParam::Options;
  const auto params = make_params();
  typename TypeParam::Optimizer optimizer(params, all_states<Options>());
  const std::string fresh = saved(optimizer);
  run_steps(optimizer, params, 0, 3);
  load(optimizer, fresh);
  EXPECT_TRUE(optimizer.state().empty());
  run_steps(optimizer, params, 3, 4);
  EXPECT_EQ(state_of(optimizer, params[0]).step().template item<float>(), 1.0f);
}

TYPED_TEST(ClassArchive, MakesMastersThatItLacksFromTheParameters) {
  using Options = typename TypeParam::Options;
  const auto params = make_params(torch::kBFloat16);
  typename TypeParam::Optimizer optimizer(params, all_states<Options>());
  run_steps(optimizer, params, 0, 2);
  options_of(optimizer).master_weights(true);
  const auto copies = copy_of(params);
  typename TypeParam::Optimizer restored(copies);
  load(restored, saved(optimizer));
  EXPECT_FALSE(state_of(restored, copies[0]).master_param().defined());
  run_steps(optimizer, params, 2, 4);
  run_steps(restored, copies, 2, 4);
  expect_equal(copies, params);
  for (std::size_t i = 0; i < params.size(); ++i) {
    EXPECT_TRUE(state_of(restored, copies[i]).master_param().defined());
    expect_same_state(state_of(restored, copies[i]), state_of(optimizer, params[i]));
  }
}

TYPED_TEST(ClassArchive, MastersOfOptionsWithoutThemAreRefused) {
  using Options = typename TypeParam::Options;
  const auto params = make_params(torch::kBFloat16);
  typename TypeParam::Optimizer optimizer(params, all_states<Options>());
  run_steps(optimizer, params, 0, 1);
  auto& state = state_of(optimizer, params[1]);
  const auto refused = [&](const char* key) {
    testing::expect_error(
        [&] { load(optimizer, saved(optimizer)); },
        std::string("expected the archive to hold no param_groups[0].state[1].") + key);
  };
  state.master_param(torch::ones({1}));
  refused("master_param");
  state.master_param(torch::Tensor());
  state.param_remainder(torch::ones({1}, torch::kShort));
  refused("param_remainder");
}

TYPED_TEST(ClassArchive, TruncatedAndForeignArchivesAreRefused) {
  const std::string name = testing::class_name<TypeParam>();
  const std::string bytes = this->edited_archive([](auto&, auto&) {});
  this->expect_refused(bytes.substr(0, bytes.size() / 2), "istream reader failed");
  this->expect_refused("", "istream reader failed");

  const auto params = make_params();
  torch::optim::AdamW foreign(params);
  this->expect_refused(saved(foreign), name + ": expected the archive to hold format");
}

TYPED_TEST(ClassArchive, OtherGroupsAndParametersAreRefused) {
  typename TypeParam::Optimizer fewer(
      std::vector<torch::Tensor>{torch::ones({2}).requires_grad_(true)});
  this->expect_refused(saved(fewer), "param_groups[0] to have 5 parameters, got 1");
  fewer.add_param_group(OptimizerParamGroup({torch::ones({3}).requires_grad_(true)}));
  this->expect_refused(saved(fewer), "expected the archive to have 1 parameter groups, got 2");
}

TYPED_TEST(ClassArchive, StatesThatDoNotFitAreRefused) {
  for (const std::string& name : this->state_names()) {
    SCOPED_TRACE(name);
    const std::string state = "param_groups[0].state[1]." + name;
    // SGD's buffer may begin later than the count: it is made in the next step, as torch's.
    if (!std::is_same_v<typename TypeParam::Optimizer, FusedSGD> || name != "momentum_buffer") {
      this->expect_refused(
          this->archive_with(name, [](const torch::Tensor&) { return torch::Tensor(); }),
          "expected the archive to hold " + state);
    }
    if (name == "exp_avg_norm") continue;  // one number: test_fused_novograd.cpp
    this->expect_refused(
        this->archive_with(name, [](const torch::Tensor&) { return torch::zeros({2}); }),
        state + " to have the sizes [1] of its parameter, got [2]");
    this->expect_refused(
        this->archive_with(name, [](const torch::Tensor& t) { return t.to(torch::kDouble); }),
        state + " to have dtype Float or BFloat16 or Half for a Float parameter, got Double");
  }
}

TYPED_TEST(ClassArchive, CountsMastersAndOptionsThatDoNotFitAreRefused) {
  const auto refused = [&](const auto& edit, const std::string& text) {
    this->expect_refused(this->edited_archive(edit), text);
  };
  refused([](auto&, auto& state) { state.step(torch::ones({2})); },
          "state[1].step to be a 0-dim Float tensor");
  refused([](auto&, auto& state) { state.step(torch::tensor(-1.0f)); },
          "state[1].step to be a finite whole number >= 0, got -1");
  refused([](auto&, auto& state) { state.step(torch::Tensor()); },
          "expected the archive to hold param_groups[0].state[1].step");
  refused([](auto&, auto& state) { state.master_param(torch::ones({2})); },
          "state[1].master_param to have the sizes [1] of its parameter, got [2]");
  refused([](auto& options, auto&) { options.lr(std::nan("")); },
          "expected param_groups[0].lr to be at least 0 and finite, got nan");
}

}  // namespace
}  // namespace torchfuse::optim
