// SPDX-License-Identifier: BSD-3-Clause
#include "ops/fused_step/layerwise.h"

#include <ATen/Functions.h>

namespace torchfuse::ops {

namespace {

constexpr std::int64_t kMeasureDoubles = sizeof(kernels::MeasurePartial) / sizeof(double);

}  // namespace

void LayerwiseWorkspace::reserve(const Bucket& bucket, int num_norms) {
  const auto rows = static_cast<std::int64_t>(bucket.rows.size());
  partials_.reserve(bucket.num_partials() * num_norms * kMeasureDoubles, bucket.key.device);
  norms_.reserve(rows * num_norms, bucket.key.device);
}

void LayerwiseWorkspace::reserve_sums(const Bucket& bucket, int num_norms) {
  const auto rows = static_cast<std::int64_t>(bucket.rows.size());
  sums_ = at::empty({rows * num_norms * kMeasureDoubles},
                    at::TensorOptions().dtype(at::kDouble).device(bucket.key.device));
  while (static_cast<std::int64_t>(counting_.size()) <= rows) {
    counting_.push_back(static_cast<std::int64_t>(counting_.size()));
  }
}

}  // namespace torchfuse::ops
