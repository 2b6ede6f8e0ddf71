// SPDX-License-Identifier: BSD-3-Clause
// The momentum of an optimizer's groups, or its first beta: what a cycle moves against the rate.
#pragma once

#include <torch/optim/optimizer.h>

#include <vector>

namespace torchfuse::optim {

/// Whether the momentum of this optimizer is the first of its betas. Throws, naming `owner`, for an
/// optimizer that has neither.
bool uses_beta1(torch::optim::Optimizer& optimizer, const char* owner);

/// The momentum of every group, or the first of its betas; empty if a group has neither.
std::vector<double> momentum_of(torch::optim::Optimizer& optimizer);

/// Sets the momentum of every group, or the first of its betas. The options are of known classes.
void set_momentum(torch::optim::Optimizer& optimizer, const std::vector<double>& momentum);

}  // namespace torchfuse::optim
