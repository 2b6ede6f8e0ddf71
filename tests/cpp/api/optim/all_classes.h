// SPDX-License-Identifier: BSD-3-Clause
// The classes of optimizers, for tests that run over all of them.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

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
using MuonClass = Class<optim::FusedMuon, optim::FusedMuonOptions, optim::FusedMuonParamState>;

using AllClasses = ::testing::Types<AdamClass, LambClass, NovoGradClass, LarsClass, SgdClass,
                                    AdagradClass, LionClass, MuonClass>;
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
  if constexpr (requires { options.ns_dtype(); }) options.ns_dtype(torch::kFloat);
  return options;
}

/// Every option of every class, other than its default.
template <class Options>
Options other_options() {
  Options options(2e-3);
  options.weight_decay(0.02).master_weights(true).max_grad_norm(0.5);
  options.write_back_grads(true).skip_non_finite(true);
  options.ema_decay(0.99).ema_warmup(true).ema_start_step(2);
  if constexpr (requires { options.maximize(); }) options.maximize(true);
  if constexpr (requires { options.betas(); }) options.betas({0.8, 0.95});
  if constexpr (requires { options.eps(); }) options.eps(1e-4);
  if constexpr (requires { options.bias_correction(); }) options.bias_correction(false);
  if constexpr (requires { options.adam_w_mode(); }) options.adam_w_mode(false);
  if constexpr (requires { options.amsgrad(); }) options.amsgrad(true);
  if constexpr (requires { options.grad_averaging(); }) options.grad_averaging(false);
  if constexpr (requires { options.use_nvlamb(); }) options.use_nvlamb(true);
  if constexpr (requires { options.min_trust_ratio(); }) options.min_trust_ratio(0.1);
  if constexpr (requires { options.max_trust_ratio(); }) options.max_trust_ratio(2.0);
  if constexpr (requires { options.reg_inside_moment(); }) options.reg_inside_moment(true);
  if constexpr (requires { options.norm_type(); }) options.norm_type(0);
  if constexpr (requires { options.init_zero(); }) options.init_zero(true);
  if constexpr (requires { options.trust_coefficient(); }) {
    options.trust_coefficient(0.02).nesterov(true);
  }
  if constexpr (requires { options.momentum(); }) options.momentum(0.7);
  if constexpr (requires { options.dampening(); }) options.dampening(0.1);
  if constexpr (requires { options.wd_after_momentum(); }) options.wd_after_momentum(true);
  if constexpr (requires { options.lr_decay(); }) options.lr_decay(0.1);
  if constexpr (requires { options.initial_accumulator_value(); }) {
    options.initial_accumulator_value(0.25).adagrad_w_mode(true);
  }
  if constexpr (requires { options.use_muon(); }) {
    options.use_muon(false).nesterov(false).ns_coefficients({3.0, -3.2, 1.2}).ns_steps(3);
    options.polar_express(true).adjust_lr_fn("match_rms_adamw").matrix_dims(2);
    options.ns_dtype(torch::kFloat).ns_batched(false).clip_apart(true);
  }
  return options;
}

/// What the class makes of options for its first group of parameters: FusedMuon puts matrices
/// there.
template <class Options>
Options of_first_group(Options options) {
  if constexpr (requires { options.use_muon(); }) options.use_muon(true);
  return options;
}

/// The optimizer's groups, each in two halves. Those of FusedMuon keep their options.
template <class Options, class State>
std::vector<torch::optim::OptimizerParamGroup> in_halves(
    optim::FusedOptimizerOf<Options, State>& optimizer) {
  std::vector<torch::optim::OptimizerParamGroup> halves;
  for (const auto& group : optimizer.param_groups()) {
    const auto& params = group.params();
    const auto middle = params.begin() + static_cast<std::ptrdiff_t>(params.size() / 2);
    for (const auto& half : {std::vector<torch::Tensor>(params.begin(), middle),
                             std::vector<torch::Tensor>(middle, params.end())}) {
      halves.emplace_back(half);
      if (std::is_same_v<Options, optim::FusedMuonOptions>) {
        halves.back().set_options(group.options().clone());
      }
    }
  }
  return halves;
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
    if (key == "step" || key == "master_param" || key == "param_remainder" || key == "ema_param") {
      continue;
    }
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
