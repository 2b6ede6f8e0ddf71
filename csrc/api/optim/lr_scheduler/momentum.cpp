// SPDX-License-Identifier: BSD-3-Clause
#include "api/optim/lr_scheduler/momentum.h"

#include <c10/util/Exception.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torchfuse/optim/fused_adam.h>
#include <torchfuse/optim/fused_lamb.h>
#include <torchfuse/optim/fused_lars.h>
#include <torchfuse/optim/fused_lion.h>
#include <torchfuse/optim/fused_muon.h>
#include <torchfuse/optim/fused_novograd.h>
#include <torchfuse/optim/fused_sgd.h>

#include <cstddef>
#include <tuple>

namespace torchfuse::optim {
namespace {

using torch::optim::OptimizerOptions;

/// Calls `visit` with the options' class if `Classes` contains that class. Returns whether it does.
template <class... Classes, class Visit>
bool visit_as(OptimizerOptions& options, const Visit& visit) {
  const auto visit_one = [&]<class Class>(Class* own) {
    if (own != nullptr) visit(*own);
    return own != nullptr;
  };
  return (visit_one(dynamic_cast<Classes*>(&options)) || ...);
}

template <class Visit>
bool visit_with_betas(OptimizerOptions& options, const Visit& visit) {
  return visit_as<FusedAdamOptions, FusedLAMBOptions, FusedLionOptions, FusedNovoGradOptions,
                  torch::optim::AdamOptions, torch::optim::AdamWOptions>(options, visit);
}

template <class Visit>
bool visit_with_momentum(OptimizerOptions& options, const Visit& visit) {
  return visit_as<FusedLARSOptions, FusedMuonOptions, FusedSGDOptions, torch::optim::RMSpropOptions,
                  torch::optim::SGDOptions>(options, visit);
}

}  // namespace

bool uses_beta1(torch::optim::Optimizer& optimizer, const char* owner) {
  bool betas = false;
  auto& groups = optimizer.param_groups();
  for (std::size_t i = 0; i < groups.size(); ++i) {
    OptimizerOptions& options = groups[i].options();
    betas = visit_with_betas(options, [](const auto&) {});
    TORCH_CHECK_TYPE(betas || visit_with_momentum(options, [](const auto&) {}), owner,
                     ": expected options with momentum or betas in group ", i,
                     " (FusedAdam, FusedLAMB, FusedLARS, FusedLion, FusedMuon, FusedNovoGrad, "
                     "FusedSGD, or torch's Adam, AdamW, RMSprop or SGD), got other options. Use "
                     "cycle_momentum(false).");
  }
  return betas;
}

std::vector<double> momentum_of(torch::optim::Optimizer& optimizer) {
  std::vector<double> momentum;
  const auto add_beta1 = [&](const auto& options) {
    momentum.push_back(std::get<0>(options.betas()));
  };
  const auto add_value = [&](const auto& options) { momentum.push_back(options.momentum()); };
  for (auto& group : optimizer.param_groups()) {
    OptimizerOptions& options = group.options();
    if (!visit_with_betas(options, add_beta1) && !visit_with_momentum(options, add_value))
      return {};
  }
  return momentum;
}

void set_momentum(torch::optim::Optimizer& optimizer, const std::vector<double>& momentum) {
  auto& groups = optimizer.param_groups();
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const auto set_beta1 = [&](auto& options) {
      options.betas(std::make_tuple(momentum[i], std::get<1>(options.betas())));
    };
    const auto set_value = [&](auto& options) { options.momentum(momentum[i]); };
    OptimizerOptions& options = groups[i].options();
    const bool set =
        visit_with_betas(options, set_beta1) || visit_with_momentum(options, set_value);
    TORCH_INTERNAL_ASSERT(set, "group ", i, " has options of another class than before");
  }
}

}  // namespace torchfuse::optim
