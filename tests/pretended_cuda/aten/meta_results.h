// SPDX-License-Identifier: BSD-3-Clause
// Sizes of results from meta kernels, remembered: most are Python's and take longer than the op.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "host_view.h"

namespace pretended_cuda {

/// What an op's meta kernel made of tensors like the arguments.
struct MetaResults {
  std::vector<at::Tensor> arguments;  ///< in the order of the call's CUDA tensors, each once
  /// Nothing if the op has no meta kernel, or one that wants data.
  std::optional<torch::jit::Stack> results;

  /// Which of the arguments stands for which tensor of this call.
  [[nodiscard]] Pairs shown(const torch::jit::Stack& call) const;
};

/// The results of the meta kernel, or those of an earlier call that it cannot tell from this one.
std::shared_ptr<const MetaResults> results_on_meta(const c10::OperatorHandle& op,
                                                   const torch::jit::Stack& arguments,
                                                   std::optional<std::size_t> generator_at);

}  // namespace pretended_cuda
