// SPDX-License-Identifier: BSD-3-Clause
// Momentum or betas[0] of an optimizer's groups, which OneCycleLR and CyclicLR change.
#pragma once

#include <torch/optim/optimizer.h>

#include <vector>

namespace torchfuse::optim {

/// Returns whether the optimizer's momentum is betas[0]. Throws, naming `owner`, if a group has
/// neither momentum nor betas.
bool uses_beta1(torch::optim::Optimizer& optimizer, const char* owner);

/// Returns every group's momentum or betas[0], or an empty vector if a group has neither.
std::vector<double> momentum_of(torch::optim::Optimizer& optimizer);

/// Sets every group's momentum or betas[0]. Every group must have momentum or betas.
void set_momentum(torch::optim::Optimizer& optimizer, const std::vector<double>& momentum);

}  // namespace torchfuse::optim
