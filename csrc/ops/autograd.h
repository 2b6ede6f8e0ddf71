// SPDX-License-Identifier: BSD-3-Clause
// Helpers shared by the ops' backward passes.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <cstddef>
#include <optional>

namespace torchfuse::ops {

inline std::optional<at::Tensor> optional_of(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

/// Returns which of the first kCount inputs need a gradient. An absent optional input is undefined
/// and has no edge, so only defined inputs are numbered.
template <std::size_t kCount>
std::array<bool, kCount> wanted_grads(const torch::autograd::AutogradContext& ctx,
                                      const torch::autograd::variable_list& inputs) {
  std::array<bool, kCount> wanted;
  std::size_t edge = 0;
  for (std::size_t i = 0; i < kCount; ++i) {
    wanted[i] = inputs[i].defined() && ctx.needs_input_grad(edge++);
  }
  return wanted;
}

/// Returns gradients that can be differentiated again. The other inputs, and the call after the
/// inputs, get an undefined gradient.
template <std::size_t kCount>
torch::autograd::variable_list differentiable_grads(const at::Tensor& output,
                                                    const torch::autograd::variable_list& inputs,
                                                    const std::array<bool, kCount>& wanted,
                                                    const at::Tensor& grad_output) {
  torch::autograd::variable_list sources;
  for (std::size_t i = 0; i < kCount; ++i) {
    if (wanted[i]) sources.push_back(inputs[i]);
  }
  const auto grads = torch::autograd::grad({output}, sources, {grad_output}, /*retain_graph=*/true,
                                           /*create_graph=*/true);
  torch::autograd::variable_list result(kCount + 1);
  for (std::size_t i = 0, next = 0; i < kCount; ++i) {
    if (wanted[i]) result[i] = grads[next++];
  }
  return result;
}

}  // namespace torchfuse::ops
