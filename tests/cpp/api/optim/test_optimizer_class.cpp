// SPDX-License-Identifier: BSD-3-Clause
// The list of all classes: optimizers made by name, and archives as the list describes them.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

#include <torchfuse/optim/fused_adam.h>
#include <torchfuse/optim/optimizer_class.h>

#include "optim_testing.h"

namespace torchfuse::optim {
namespace {

using testing::expect_error;
using testing::make_params;
using testing::reopened;
using testing::set_grads;
using torch::optim::OptimizerParamGroup;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

OptimizerClass class_of(const std::string& name) {
  for (const OptimizerClass& listed : optimizer_classes()) {
    if (listed.name == name) return listed;
  }
  throw std::runtime_error("no class " + name);
}

std::vector<std::string> required_states(const FusedAdamOptions& options) {
  OutputArchive written;
  options.serialize(written);
  InputArchive archive = reopened(written);
  return class_of("FusedAdam").required_states(archive, "group 3");
}

TEST(OptimizerClass, AreSortedByName) {
  const std::vector<OptimizerClass> classes = optimizer_classes();
  ASSERT_FALSE(classes.empty());
  for (std::size_t i = 1; i < classes.size(); ++i) EXPECT_LT(classes[i - 1].name, classes[i].name);
  EXPECT_EQ(class_of("FusedAdam").algorithm, "adam");
}

TEST(OptimizerClass, MakesOptimizersWhoseArchivesItDescribes) {
  for (const OptimizerClass& listed : optimizer_classes()) {
    SCOPED_TRACE(listed.name);
    const auto params = make_params();
    const torch::Tensor before = params[0].detach().clone();
    const auto optimizer = listed.make({OptimizerParamGroup(params)});
    set_grads(params, 1);
    optimizer->step();
    EXPECT_FALSE(torch::equal(params[0], before));

    OutputArchive written;
    optimizer->save(written);
    InputArchive archive = reopened(written);
    c10::IValue format;
    archive.read("format", format);
    EXPECT_EQ(format.toStringRef(), listed.archive_format);
    InputArchive group;
    InputArchive options;
    InputArchive state;
    archive.read("group/0", group);
    group.read("options", options);
    group.read("state/0", state);
    const std::vector<std::string> keys = state.keys();
    for (const std::string& required : listed.required_states(options, "group 0")) {
      EXPECT_EQ(std::count(keys.begin(), keys.end(), required), 1) << required;
      EXPECT_EQ(std::count(listed.states.begin(), listed.states.end(), required), 1) << required;
    }
  }
}

TEST(OptimizerClass, DefaultOptionsAreThoseOfTheClass) {
  OutputArchive written;
  class_of("FusedAdam").write_default_options(written);
  InputArchive archive = reopened(written);
  FusedAdamOptions options(0.5);
  options.serialize(archive);
  EXPECT_EQ(options.lr(), FusedAdamOptions().lr());
  EXPECT_EQ(options.betas(), FusedAdamOptions().betas());
}

TEST(OptimizerClass, RequiredStatesFollowTheOptions) {
  EXPECT_EQ(required_states(FusedAdamOptions()),
            (std::vector<std::string>{"exp_avg", "exp_avg_sq"}));
  EXPECT_EQ(required_states(FusedAdamOptions().amsgrad(true)),
            (std::vector<std::string>{"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}));
}

TEST(OptimizerClass, RefusesOptionsThatTheClassRefuses) {
  expect_error([] { required_states(FusedAdamOptions().eps(std::nan(""))); },
               "FusedAdam: expected group 3.eps to be at least 0 and finite, got nan");
  OutputArchive written;
  written.write("lr", c10::IValue(0.1));
  InputArchive archive = reopened(written);
  expect_error([&] { class_of("FusedAdam").required_states(archive, "group 3"); },
               "FusedAdamOptions: expected the archive to hold betas");
}

}  // namespace
}  // namespace torchfuse::optim
