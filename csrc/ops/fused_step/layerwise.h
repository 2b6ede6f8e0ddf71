// SPDX-License-Identifier: BSD-3-Clause
// What layerwise optimizers need beside the common step. See Note [Layerwise optimizers].
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "kernels/layerwise_optimizer.h"
#include "ops/bucket.h"
#include "ops/fused_step/workspace.h"

namespace torchfuse::ops {

/// Elements that a thread's caches are to hold between the phases, with all their operands: a
/// megabyte for fp32 LAMB.
constexpr std::int64_t kCachedElements = 65536;

/// Partials and norms of one bucket, kept between steps: 64 bytes for 16,384 elements.
class LayerwiseWorkspace {
 public:
  void reserve(const Bucket& bucket, int num_norms);
  kernels::MeasurePartial* partials() const {
    return reinterpret_cast<kernels::MeasurePartial*>(partials_.data());
  }
  double* norms() const { return norms_.data(); }

  /// For tensors that are split over processes: memory for their sums, and each as one partial.
  void reserve_sums(const Bucket& bucket, int num_norms);
  const at::Tensor& sums() const { return sums_; }
  const std::int64_t* one_partial_each() const { return counting_.data(); }

 private:
  Workspace partials_;
  Workspace norms_;
  at::Tensor sums_;                     ///< as doubles, exactly those of the bucket
  std::vector<std::int64_t> counting_;  ///< 0, 1, 2, ...
};

/// The rows from `first` on whose elements the threads' caches hold together: at least one.
std::int64_t end_of_cached_span(const Bucket& bucket, std::int64_t first);

/// Calls visit(first, last) for consecutive spans of the bucket's rows.
template <class Visit>
void for_each_cached_span(const Bucket& bucket, const Visit& visit) {
  const auto count = static_cast<std::int64_t>(bucket.rows.size());
  for (std::int64_t first = 0; first < count;) {
    const std::int64_t last = end_of_cached_span(bucket, first);
    visit(first, last);
    first = last;
  }
}

}  // namespace torchfuse::ops
