// SPDX-License-Identifier: BSD-3-Clause
// Archives of every class: exact round trips, and refusals that leave the optimizer as it was.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstddef>
#include <limits>
#include <map>
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

  /// The archive of an optimizer over make_params() after `edit` of the options and of the state
  /// of params[index].
  template <typename Edit>
  static std::string edited_archive(Edit&& edit, std::size_t index = 1) {
    const auto params = make_params();
    Optimizer optimizer(params, all_states<Options>());
    run_steps(optimizer, params, 0, 1);
    auto& group = optimizer.param_groups()[place_of(optimizer, params[index]).group];
    edit(static_cast<Options&>(group.options()), state_of(optimizer, params[index]));
    return saved(optimizer);
  }

  /// The same with the class's state `name` replaced by what `replace` makes of it, or without it.
  template <typename Replace>
  static std::string archive_with(std::size_t index, const std::string& name, Replace&& replace) {
    const auto edit = [&](Options&, State& state) {
      auto entries = entries_of(state);
      const torch::Tensor tensor = replace(entries.at(name).toTensor());
      entries.erase(name);
      if (tensor.defined()) entries[name] = tensor;
      read_entries(state, entries);
    };
    return edited_archive(edit, index);
  }

  /// Where optimizers over make_params() list params[index].
  static Place listed(std::size_t index) {
    const auto params = make_params();
    Optimizer optimizer(params, all_states<Options>());
    return place_of(optimizer, params[index]);
  }

  /// The class's states, the longest list that options can ask for, each with the number of a
  /// parameter that has it: 1, or 0 for what only matrices have.
  static std::map<std::string, std::size_t> owners_of_states() {
    const auto params = make_params();
    Optimizer optimizer(params, all_states<Options>());
    run_steps(optimizer, params, 0, 1);
    std::map<std::string, std::size_t> owners;
    for (const std::size_t index : {1, 0}) {
      for (const auto& entry : own_states(state_of(optimizer, params[index]))) {
        owners.try_emplace(entry.first, index);
      }
    }
    return owners;
  }
};
TYPED_TEST_SUITE(ClassArchive, testing::AllClasses, testing::ClassNames);

TYPED_TEST(ClassArchive, RoundTripContinuesBitForBit) {
  using Options = typename TypeParam::Options;
  const auto masters = other_options<Options>();
  const auto narrow = all_states<Options>().state_dtype(torch::kBFloat16);
  const std::vector<std::pair<torch::ScalarType, Options>> cases{
      {torch::kFloat, masters},
      {torch::kDouble, masters},
      {torch::kBFloat16, masters},
      {torch::kBFloat16, Options(narrow).master_weights(true).store_param_remainders(true)},
      {torch::kBFloat16, Options(narrow).stochastic_rounding(true).seed(9)}};
  for (const auto& [dtype, options] : cases) {
    const auto params = make_params(dtype);
    typename TypeParam::Optimizer optimizer(params, options);
    run_steps(optimizer, params, 0, 5);

    const auto copies = copy_of(params);
    typename TypeParam::Optimizer restored(copies);
    load(restored, saved(optimizer));
    EXPECT_EQ(entries_of(options_of(restored)), entries_of(of_first_group(options)));
    for (std::size_t g = 0; g < restored.param_groups().size(); ++g) {
      EXPECT_EQ(entries_of(static_cast<Options&>(restored.param_groups()[g].options())),
                entries_of(static_cast<Options&>(optimizer.param_groups()[g].options())));
    }

    run_steps(optimizer, params, 5, 8);
    run_steps(restored, copies, 5, 8);
    expect_equal(copies, params);
    for (std::size_t i = 0; i < params.size(); ++i) {
      const auto& state = state_of(restored, copies[i]);
      expect_same_state(state, state_of(optimizer, params[i]));
      EXPECT_EQ(state.step().template item<float>(), 8.0f);
      EXPECT_EQ(state.param_remainder().defined(), options.store_param_remainders());
    }
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

TYPED_TEST(ClassArchive, MastersThatWereSwitchedOnOrOffAreMadeOrDropped) {
  using Options = typename TypeParam::Options;
  for (const bool switched_on : {true, false}) {
    const auto params = make_params(torch::kBFloat16);
    typename TypeParam::Optimizer optimizer(params,
                                            all_states<Options>().master_weights(!switched_on));
    run_steps(optimizer, params, 0, 2);
    edit_options(optimizer, [&](Options& options) { options.master_weights(switched_on); });
    const auto copies = copy_of(params);
    typename TypeParam::Optimizer restored(copies);
    load(restored, saved(optimizer));
    run_steps(optimizer, params, 2, 4);
    run_steps(restored, copies, 2, 4);
    expect_equal(copies, params);
    for (std::size_t i = 0; i < params.size() && switched_on; ++i) {
      EXPECT_TRUE(state_of(restored, copies[i]).master_param().defined());
      expect_same_state(state_of(restored, copies[i]), state_of(optimizer, params[i]));
    }
  }
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
  const auto params = make_params();
  typename TypeParam::Optimizer own(params);
  typename TypeParam::Optimizer fewer(std::vector<torch::Tensor>{params[0], params[1]});
  const std::size_t groups = own.param_groups().size();
  this->expect_refused(saved(fewer),
                       c10::str("param_groups[0] to have ", own.param_groups()[0].params().size(),
                                " parameters, got ", fewer.param_groups()[0].params().size()));
  fewer.add_param_group(OptimizerParamGroup({torch::ones({3, 2}).requires_grad_(true)}));
  this->expect_refused(saved(fewer), c10::str("expected the archive to have ", groups,
                                              " parameter groups, got ", groups + 1));
}

TYPED_TEST(ClassArchive, StatesThatDoNotFitAreRefused) {
  for (const auto& [name, index] : this->owners_of_states()) {
    SCOPED_TRACE(name);
    const std::string state = this->listed(index).state_name() + "." + name;
    // SGD's buffer may begin later than the count: it is made in the next step, as torch's.
    if (!std::is_same_v<typename TypeParam::Optimizer, FusedSGD> || name != "momentum_buffer") {
      this->expect_refused(
          this->archive_with(index, name, [](const torch::Tensor&) { return torch::Tensor(); }),
          "expected the archive to hold " + state);
    }
    if (name == "exp_avg_norm") {  // one number
      for (const torch::Tensor& norm :
           {torch::ones({37, 5}), torch::ones({}, torch::kDouble), torch::ones({1})}) {
        this->expect_refused(
            this->archive_with(index, name, [&](const torch::Tensor&) { return norm; }),
            c10::str(state, " to be a 0-dim Float tensor for a Float parameter, got a ", norm.dim(),
                     "-dim "));
      }
      continue;
    }
    this->expect_refused(
        this->archive_with(index, name, [](const torch::Tensor&) { return torch::zeros({2}); }),
        c10::str(state, " to have the sizes ", make_params()[index].sizes(),
                 " of its parameter, got [2]"));
    this->expect_refused(
        this->archive_with(index, name,
                           [](const torch::Tensor& t) { return t.to(torch::kDouble); }),
        state + " to have dtype Float or BFloat16 or Half for a Float parameter, got Double");
  }
}

TYPED_TEST(ClassArchive, CountsMastersAndOptionsThatDoNotFitAreRefused) {
  const auto refused = [&](const auto& edit, const std::string& text) {
    this->expect_refused(this->edited_archive(edit), text);
  };
  const Place place = this->listed(1);
  const std::string state_name = place.state_name();
  refused([](auto&, auto& state) { state.step(torch::ones({2})); },
          state_name + ".step to be a 0-dim Float tensor");
  refused([](auto&, auto& state) { state.step(torch::tensor(-1.0f)); },
          state_name + ".step to be a finite integer >= 0, got -1");
  refused([](auto&, auto& state) { state.step(torch::Tensor()); },
          "expected the archive to hold " + state_name + ".step");
  const auto with_master = [](auto& options, auto& state) {
    options.master_weights(true);
    state.master_param(torch::ones({2}));
  };
  refused(with_master,
          state_name + ".master_param to have the sizes [1] of its parameter, got [2]");
  refused([](auto& options, auto&) { options.lr(std::nan("")); },
          "expected " + place.group_name() + ".lr to be at least 0 and finite, got nan");
}

TEST(FusedAdamArchive, TakesTheLayoutOfTheParameter) {
  const torch::Tensor rows = torch::randn({2, 3, 4, 5}).requires_grad_(true);
  FusedAdam optimizer(std::vector<torch::Tensor>{rows});
  run_steps(optimizer, {rows}, 0, 2);
  const torch::Tensor channels_last =
      rows.detach().contiguous(torch::MemoryFormat::ChannelsLast).requires_grad_(true);
  FusedAdam restored(std::vector<torch::Tensor>{channels_last});
  load(restored, saved(optimizer));
  EXPECT_EQ(state_of(restored, channels_last).exp_avg().strides(), channels_last.strides());
  run_steps(optimizer, {rows}, 2, 3);
  run_steps(restored, {channels_last}, 2, 3);
  EXPECT_TRUE(torch::equal(rows, channels_last));
}

TEST(FusedAdamArchive, SavesAStepCountWithoutTheBufferBehindIt) {
  std::vector<torch::Tensor> params;
  for (int i = 0; i < 200; ++i) params.push_back(torch::ones({1}).requires_grad_(true));
  FusedAdam optimizer(params);
  run_steps(optimizer, params, 0, 1);
  const torch::Tensor step = entries_of(state_of(optimizer, params[7])).at("step").toTensor();
  EXPECT_EQ(step.storage().nbytes(), sizeof(float));
}

}  // namespace
}  // namespace torchfuse::optim
