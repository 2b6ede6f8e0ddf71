// SPDX-License-Identifier: BSD-3-Clause
// The arguments of a synchronized batch normalization, and the layer in torch's operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

namespace torchfuse::ops {

/// A call's arguments other than the tensors that have gradients.
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

/// The layer in torch's operators, with moments over all ranks (Ioffe and Szegedy 2015). Autograd
/// can differentiate it any number of times. `inputs` begins with input, weight, bias and residual;
/// the last three may be undefined.
at::Tensor composite_batch_norm(const std::vector<at::Tensor>& inputs,
                                const SyncBatchNormCall& call);

}  // namespace torchfuse::ops
