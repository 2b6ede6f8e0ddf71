// SPDX-License-Identifier: BSD-3-Clause
// Plans which parameters are reduced together.
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

/// Fills buckets in the given order, separately for each dtype and device. Sorts buckets by the
/// last member's position, which is the order of completion.
/// @param order indices into `parameters`, without duplicates.
std::vector<std::vector<std::size_t>> plan_buckets(const std::vector<at::Tensor>& parameters,
                                                   const std::vector<std::size_t>& order,
                                                   const BucketSizes& sizes);

/// A bucket's memory, and the views that become its members' gradients. Views have autograd's
/// gradient layout: dense parameters keep their strides, others are contiguous. Each view is
/// aligned to 16 bytes for vectorized access. Gaps between views are zero.
struct BucketMemory {
  at::Tensor flat;
  std::vector<at::Tensor> views;
};

BucketMemory allocate_bucket(const std::vector<at::Tensor>& parameters,
                             const std::vector<std::size_t>& members);

}  // namespace torchfuse::parallel
