// SPDX-License-Identifier: BSD-3-Clause
// Builds buckets from one list of tensors, for the ops that read or scale gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "ops/bucket.h"
#include "ops/check.h"

namespace torchfuse::ops {

/// One list argument's tensors as rows whose `grad` is the tensor. All tensors must be on one
/// device. Contiguous copies represent tensors with gaps or overlap, and lazily negated tensors.
class TensorList {
 public:
  TensorList(const char* op, const char* name, at::TensorList tensors);

  const c10::Device& device() const { return device_; }
  std::vector<Bucket>& buckets() { return buckets_.all(); }
  /// Copies results back into the tensors that copies represented.
  void copy_back();

 private:
  c10::Device device_{c10::kCPU};
  Buckets buckets_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

}  // namespace torchfuse::ops
