// SPDX-License-Identifier: BSD-3-Clause
// Buckets from one list of tensors, for the ops that read or scale gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "ops/bucket.h"
#include "ops/check.h"

namespace torchfuse::ops {

/// The tensors of one list argument as rows whose `grad` is the tensor. All must be on one
/// device. Tensors that do not fill their memory one to one, or are lazily negated, are represented
/// by contiguous copies.
class TensorList {
 public:
  TensorList(const char* op, const char* name, at::TensorList tensors);

  const c10::Device& device() const { return device_; }
  std::vector<Bucket>& buckets() { return buckets_.all(); }
  /// Copies results back into the tensors that were represented by copies.
  void copy_back();

 private:
  c10::Device device_{c10::kCPU};
  Buckets buckets_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;
};

}  // namespace torchfuse::ops
