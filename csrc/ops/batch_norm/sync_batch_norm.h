// SPDX-License-Identifier: BSD-3-Clause
// One call of a synchronized batch normalization, and its gradients as differentiable functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

namespace torchfuse::ops {

/// What a call consists of beside the tensors that have gradients.
struct SyncBatchNormCall {
  std::optional<at::Tensor> running_mean;
  std::optional<at::Tensor> running_var;
  std::optional<at::Tensor> num_batches_tracked;
  std::optional<at::Tensor> packed;
  bool batch_statistics = true;
  std::optional<double> momentum;
  double eps = 1e-5;
  bool relu = false;
  std::optional<std::string> group;
  std::string caller;
  bool deterministic = false;
};

/// Input, weight, bias and residual of a call; the last three may be undefined.
struct BatchNormInputs {
  at::Tensor input;
  at::Tensor weight;
  at::Tensor bias;
  at::Tensor residual;
};

struct BatchNormGradsWanted {
  bool input = false;
  bool weight = false;
  bool bias = false;
  bool residual = false;
};

/// Gradients of the four inputs, undefined where not wanted, that can be differentiated again:
/// those of the same function, written in torch's operators, which is evaluated once more.
std::vector<at::Tensor> differentiable_batch_norm_grads(const BatchNormInputs& inputs,
                                                        const at::Tensor& grad_output,
                                                        const BatchNormGradsWanted& wanted,
                                                        const SyncBatchNormCall& call);

}  // namespace torchfuse::ops
