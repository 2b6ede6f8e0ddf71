// SPDX-License-Identifier: BSD-3-Clause
// FusedAdam's archives: exact round trips, and refusals that leave the optimizer as it was.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <torchfuse/optim/fused_adam.h>

#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using testing::copy_of;
using testing::expect_equal;
using testing::expect_error;
using testing::make_params;
using testing::options_of;
using testing::run_steps;
using testing::state_of;
using torch::optim::OptimizerParamGroup;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::string saved(const FusedAdam& optimizer) {
  std::ostringstream stream;
  torch::save(optimizer, stream);
  return stream.str();
}

void load(FusedAdam& optimizer, const std::string& bytes) {
  std::istringstream stream(bytes);
  torch::load(optimizer, stream);
}

TEST(FusedAdamArchive, RoundTripContinuesBitForBit) {
  for (const auto dtype : {torch::kFloat, torch::kBFloat16, torch::kDouble}) {
    const auto params = make_params(dtype);
    FusedAdam optimizer(params, FusedAdamOptions(2e-3)
                                    .betas({0.8, 0.95})
                                    .weight_decay(0.01)
                                    .amsgrad(true)
                                    .master_weights(true)
                                    .max_grad_norm(0.5));
    run_steps(optimizer, params, 0, 5);

    const auto copies = copy_of(params);
    FusedAdam restored(copies);
    load(restored, saved(optimizer));
    EXPECT_EQ(options_of(restored).betas(), std::make_tuple(0.8, 0.95));
    EXPECT_EQ(options_of(restored).max_grad_norm(), 0.5);
    EXPECT_EQ(state_of(restored, copies[0]).exp_avg().scalar_type(),
              dtype == torch::kDouble ? torch::kDouble : torch::kFloat);

    run_steps(optimizer, params, 5, 8);
    run_steps(restored, copies, 5, 8);
    expect_equal(copies, params);
    for (std::size_t i = 0; i < params.size(); ++i) {
      const FusedAdamParamState& a = state_of(restored, copies[i]);
      const FusedAdamParamState& b = state_of(optimizer, params[i]);
      expect_equal({a.step(), a.exp_avg(), a.exp_avg_sq(), a.max_exp_avg_sq()},
                   {b.step(), b.exp_avg(), b.exp_avg_sq(), b.max_exp_avg_sq()});
      ASSERT_EQ(a.master_param().defined(), dtype == torch::kBFloat16);
      if (a.master_param().defined()) {
        EXPECT_TRUE(torch::equal(a.master_param(), b.master_param()));
      }
    }
  }
}

TEST(FusedAdamArchive, ReplacesStatesAndKeepsParametersWithoutState) {
  const auto params = make_params();
  FusedAdam optimizer(params);
  const std::string fresh = saved(optimizer);
  run_steps(optimizer, params, 0, 3);
  load(optimizer, fresh);
  EXPECT_TRUE(optimizer.state().empty());
  run_steps(optimizer, params, 3, 4);
  EXPECT_EQ(state_of(optimizer, params[0]).step().item<float>(), 1.0f);
}

TEST(FusedAdamArchive, MakesMastersThatItLacksFromTheParameters) {
  const auto params = make_params(torch::kBFloat16);
  FusedAdam optimizer(params, FusedAdamOptions(2e-3));
  run_steps(optimizer, params, 0, 2);
  options_of(optimizer).master_weights(true);
  const auto copies = copy_of(params);
  FusedAdam restored(copies);
  load(restored, saved(optimizer));
  EXPECT_FALSE(state_of(restored, copies[0]).master_param().defined());
  run_steps(optimizer, params, 2, 4);
  run_steps(restored, copies, 2, 4);
  expect_equal(copies, params);
  for (std::size_t i = 0; i < params.size(); ++i) {
    expect_equal({state_of(restored, copies[i]).master_param()},
                 {state_of(optimizer, params[i]).master_param()});
  }
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
  std::ostringstream stream;
  torch::serialize::OutputArchive archive;
  state_of(optimizer, params[7]).serialize(archive);
  archive.save_to(stream);
  std::istringstream input(stream.str());
  torch::serialize::InputArchive loaded;
  loaded.load_from(input);
  FusedAdamParamState state;
  state.serialize(loaded);
  EXPECT_EQ(state.step().storage().nbytes(), sizeof(float));
}

/// Loading `bytes` into an optimizer fails with `text` and leaves it as it was.
void expect_refused(const std::string& bytes, const std::string& text) {
  const auto params = make_params();
  const auto copies = copy_of(params);
  FusedAdam optimizer(params);
  FusedAdam untouched(copies);
  run_steps(optimizer, params, 0, 2);
  run_steps(untouched, copies, 0, 2);
  expect_error([&] { load(optimizer, bytes); }, text);
  run_steps(optimizer, params, 2, 4);
  run_steps(untouched, copies, 2, 4);
  expect_equal(params, copies);
}

/// The archive of an optimizer over make_params() after `edit`.
template <typename Edit>
std::string edited_archive(Edit&& edit) {
  const auto params = make_params();
  FusedAdam optimizer(params);
  run_steps(optimizer, params, 0, 1);
  edit(optimizer, state_of(optimizer, params[1]));
  return saved(optimizer);
}

TEST(FusedAdamArchive, RefusesTruncatedAndForeignArchives) {
  const auto params = make_params();
  FusedAdam optimizer(params);
  run_steps(optimizer, params, 0, 1);
  const std::string bytes = saved(optimizer);
  expect_refused(bytes.substr(0, bytes.size() / 2), "istream reader failed");
  expect_refused("", "istream reader failed");

  torch::optim::AdamW foreign(params);
  std::ostringstream stream;
  torch::save(foreign, stream);
  expect_refused(stream.str(), "FusedAdam: expected the archive to hold format");
}

TEST(FusedAdamArchive, RefusesOtherGroupsAndParameters) {
  FusedAdam fewer(std::vector<torch::Tensor>{torch::ones({2}).requires_grad_(true)});
  expect_refused(saved(fewer), "param_groups[0] to have 5 parameters, got 1");
  fewer.add_param_group(OptimizerParamGroup({torch::ones({3}).requires_grad_(true)}));
  expect_refused(saved(fewer), "expected the archive to have 1 parameter groups, got 2");
}

TEST(FusedAdamArchive, RefusesStatesThatDoNotFit) {
  using State = FusedAdamParamState;
  expect_refused(edited_archive([](FusedAdam&, State& s) { s.exp_avg(torch::zeros({2})); }),
                 "state[1].exp_avg to have the sizes [1] of its parameter, got [2]");
  expect_refused(
      edited_archive([](FusedAdam&, State& s) { s.exp_avg(s.exp_avg().to(torch::kDouble)); }),
      "state[1].exp_avg to have dtype Float or BFloat16 or Half for a Float parameter, got Double");
  expect_refused(edited_archive([](FusedAdam&, State& s) { s.exp_avg_sq(torch::Tensor()); }),
                 "expected the archive to hold param_groups[0].state[1].exp_avg_sq");
  expect_refused(edited_archive([](FusedAdam&, State& s) { s.step(torch::ones({2})); }),
                 "state[1].step to be a 0-dim Float tensor");
  expect_refused(edited_archive([](FusedAdam&, State& s) { s.step(torch::tensor(-1.0f)); }),
                 "state[1].step to be a finite number >= 0, got -1");
  expect_refused(edited_archive([](FusedAdam&, State& s) { s.master_param(torch::ones({1})); }),
                 "expected the archive to hold no param_groups[0].state[1].master_param");
  expect_refused(edited_archive([](FusedAdam& o, State&) { options_of(o).amsgrad(true); }),
                 "expected the archive to hold param_groups[0].state[0].max_exp_avg_sq");
  expect_refused(edited_archive([](FusedAdam& o, State&) { options_of(o).lr(kNan); }),
                 "expected param_groups[0].lr to be a finite number >= 0, got nan");
}

}  // namespace
}  // namespace torchfuse::optim
