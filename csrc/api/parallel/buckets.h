// SPDX-License-Identifier: BSD-3-Clause
// Which parameters are reduced together.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torchfuse::parallel {

/// Sizes at which a bucket is complete, in bytes.
struct BucketSizes {
  std::int64_t first;
  std::int64_t others;
};

/// Fills buckets in the given order, those of each dtype and device apart, and sorts them by the
/// place of their last member: the order in which they will be complete.
/// @param order indices into `parameters`, each once.
std::vector<std::vector<std::size_t>> plan_buckets(const std::vector<at::Tensor>& parameters,
                                                   const std::vector<std::size_t>& order,
                                                   const BucketSizes& sizes);

/// A bucket's memory and the views that are its members' gradients, with the layout that autograd
/// gives to gradients: dense parameters keep their strides, others are contiguous. Each view starts
/// at 16 bytes, where kernels read and write whole vectors; what lies between them is zero.
struct BucketMemory {
  at::Tensor flat;
  std::vector<at::Tensor> views;
};

BucketMemory allocate_bucket(const std::vector<at::Tensor>& parameters,
                             const std::vector<std::size_t>& members);

}  // namespace torchfuse::parallel
