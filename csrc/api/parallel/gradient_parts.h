// SPDX-License-Identifier: BSD-3-Clause
// Which part of each gradient a process keeps, and where a Reducer puts it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "api/parallel/partition.h"

namespace torchfuse::parallel {

/// Parameters in flat tensors, and this process's parts of them, whose gradients are those of the
/// parameters.
class GradientParts {
 public:
  /// @param parts for each parameter a tensor with its partition.own(index) elements.
  GradientParts(std::vector<at::Tensor> params, std::vector<at::Tensor> parts, Partition partition);

  /// The model's.
  const std::vector<at::Tensor>& params() const { return params_; }
  /// This process's parts of them, in their order.
  const std::vector<at::Tensor>& parts() const { return parts_; }
  const Partition& partition() const { return partition_; }
  /// Adds to the gradient of part `index`.
  /// @param own this process's part of the gradients of the parameter's flat tensor; the gradient
  ///   becomes a view of it if there was none.
  void add(std::size_t index, const at::Tensor& own);
  /// Whether a backward has begun to reduce gradients that are not added yet.
  bool under_way() const { return under_way_; }
  void set_under_way(bool under_way) { under_way_ = under_way; }

 protected:
  std::vector<at::Tensor> params_;
  std::vector<at::Tensor> parts_;
  Partition partition_;
  bool under_way_ = false;
};

}  // namespace torchfuse::parallel
