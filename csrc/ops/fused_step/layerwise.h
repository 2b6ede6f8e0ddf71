// SPDX-License-Identifier: BSD-3-Clause
// Workspace and cached spans for layerwise optimizers. See Note [Layerwise optimizers].
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "kernels/layerwise_optimizer.h"
#include "ops/bucket.h"
#include "ops/fused_step/workspace.h"

namespace torchfuse::ops {

/// Number of elements that a thread's caches should hold between the phases, with all operands: a
/// megabyte for fp32 LAMB.
constexpr std::int64_t kCachedElements = 65536;

/// One bucket's partials and norms, kept between steps: 64 bytes per 16,384 elements.
class LayerwiseWorkspace {
 public:
  void reserve(const Bucket& bucket, int num_norms);
  kernels::MeasurePartial* partials() const {
    return reinterpret_cast<kernels::MeasurePartial*>(partials_.data());
  }
  double* norms() const { return norms_.data(); }

  /// For sharded tensors: reserves memory for one sum per tensor, and lets each sum count as one
  /// partial.
  void reserve_sums(const Bucket& bucket, int num_norms);
  const at::Tensor& sums() const { return sums_; }
  const std::int64_t* one_partial_each() const { return counting_.data(); }

 private:
  Workspace partials_;
  Workspace norms_;
  at::Tensor sums_;                     ///< the bucket's sums, as doubles
  std::vector<std::int64_t> counting_;  ///< 0, 1, 2, ...
};

/// Calls visit(first, last) for consecutive spans of the bucket's rows. The threads' caches
/// together hold a span's elements, but a span has at least one row.
template <class Visit>
void for_each_cached_span(const Bucket& bucket, const Visit& visit) {
  const auto count = static_cast<std::int64_t>(bucket.rows.size());
  for (std::int64_t first = 0; first < count;) {
    const std::int64_t limit = bucket.offsets[first] + kCachedElements * at::get_num_threads();
    std::int64_t last = first + 1;
    while (last < count && bucket.offsets[last + 1] <= limit) ++last;
    visit(first, last);
    first = last;
  }
}

}  // namespace torchfuse::ops
