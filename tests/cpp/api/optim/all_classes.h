// SPDX-License-Identifier: BSD-3-Clause
// The classes of optimizers, for tests that run over all of them.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <optional>
#include <string>

#include <torchfuse/torchfuse.h>

#include "optim_testing.h"

namespace torchfuse::testing {

/// A class with its options and state.
template <class OptimizerType, class OptionsType, class StateType>
struct Class {
  using Optimizer = OptimizerType;
  using Options = OptionsType;
  using State = StateType;
};

using AdamClass = Class<optim::FusedAdam, optim::FusedAdamOptions, optim::FusedAdamParamState>;
using LambClass = Class<optim::FusedLAMB, optim::FusedLAMBOptions, optim::FusedLAMBParamState>;
using NovoGradClass =
    Class<optim::FusedNovoGrad, optim::FusedNovoGradOptions, optim::FusedNovoGradParamState>;
using LarsClass = Class<optim::FusedLARS, optim::FusedLARSOptions, optim::FusedLARSParamState>;
using SgdClass = Class<optim::FusedSGD, optim::FusedSGDOptions, optim::FusedSGDParamState>;
using AdagradClass =
    Class<optim::FusedAdagrad, optim::FusedAdagradOptions, optim::FusedAdagradParamState>;
using LionClass = Class<optim::FusedLion, optim::FusedLionOptions, optim::FusedLionParamState>;

using AllClasses = ::testing::Types<AdamClass, LambClass, NovoGradClass, LarsClass, SgdClass,
                                    AdagradClass, LionClass>;
using ClassesWithMoments = ::testing::Types<AdamClass, LambClass, NovoGradClass, LionClass>;

/// "FusedAdam"
template <class Type>
std::string class_name() {
  const std::string name = c10::demangle_type<typename Type::Optimizer>();
  return name.substr(name.rfind(':') + 1);
}

struct ClassNames {
  template <class Type>
  static std::string GetName(int) {
    return class_name<Type>();
  }
};

/// Options under which all of a class's states are in use, and no parameter's step depends on
/// another parameter.
template <class Options>
Options all_states() {
  Options options;
  options.max_grad_norm(std::nullopt);
  if constexpr (requires { options.momentum(); }) options.momentum(0.9);
  if constexpr (requires { options.amsgrad(); }) options.amsgrad(true);
  return options;
}

using Entries = std::map<std::string, c10::IValue>;

/// What options or a state write into an archive.
template <class Written>
Entries entries_of(const Written& value) {
  torch::serialize::OutputArchive written;
  value.serialize(written);
  torch::serialize::InputArchive archive = reopened(written);
  Entries entries;
  for (const std::string& key : archive.keys()) archive.read(key, entries[key]);
  return entries;
}

/// Reads options or a state from an archive with these entries.
template <class Written>
void read_entries(Written& value, const Entries& entries) {
  torch::serialize::OutputArchive written;
  for (const auto& [key, entry] : entries) written.write(key, entry);
  torch::serialize::InputArchive archive = reopened(written);
  value.serialize(archive);
}

/// The states that the class adds to those that all classes have.
template <class State>
std::map<std::string, torch::Tensor> own_states(const State& state) {
  std::map<std::string, torch::Tensor> tensors;
  for (const auto& [key, entry] : entries_of(state)) {
    if (key == "step" || key == "master_param" || key == "param_remainder") continue;
    tensors[key] = entry.toTensor();
  }
  return tensors;
}

template <class State>
void expect_same_state(const State& actual, const State& expected) {
  const Entries mine = entries_of(actual);
  const Entries theirs = entries_of(expected);
  ASSERT_EQ(mine.size(), theirs.size());
  for (const auto& [key, entry] : theirs) {
    ASSERT_EQ(mine.count(key), 1u) << key;
    const torch::Tensor tensor = mine.at(key).toTensor();
    EXPECT_EQ(tensor.scalar_type(), entry.toTensor().scalar_type()) << key;
    EXPECT_TRUE(torch::equal(tensor, entry.toTensor())) << key;
  }
}

}  // namespace torchfuse::testing
