// SPDX-License-Identifier: BSD-3-Clause
// A module's parameters and buffers, as in Python's state_dict().
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "api/checkpoint/values.h"

namespace torchfuse::checkpoint {

/// Returns names and tensors, in the order of Python's state_dict().
std::vector<std::pair<std::string, at::Tensor>> named_tensors(const torch::nn::Module& module);

/// Checks names and shapes and whether the values can be copied, and returns the function that
/// copies the values.
/// @param where "expected <part>", for error messages.
std::function<void()> prepare_model(const torch::nn::Module& module, const Dict& saved,
                                    const std::string& where);

}  // namespace torchfuse::checkpoint
