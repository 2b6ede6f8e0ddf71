// SPDX-License-Identifier: BSD-3-Clause
#include "ops/fused_step/sharding.h"

#include <torchfuse/collectives.h>

#include "kernels/layerwise_optimizer.h"

namespace torchfuse::ops {

void sum_over_shards(const at::Tensor& partials, const std::vector<std::string>& groups) {
  constexpr std::int64_t kDoubles = sizeof(kernels::NormPartial) / sizeof(double);
  constexpr std::int64_t kNonfinite = offsetof(kernels::NormPartial, nonfinite) / sizeof(double);
  // The flag's bits, read as a double, are a denormal number, which an addition may flush.
  const at::Tensor flags = partials.view({-1, kDoubles}).select(1, kNonfinite);
  const at::Tensor bits = flags.view(at::kLong);
  flags.copy_(bits.ne(0));
  all_reduce_(partials, "sum", groups, "The norm of gradients");
  bits.copy_(flags.ne(0.0));
}

void sum_measured_over_shards(const at::Tensor& sums, bool uses_largest,
                              const std::vector<std::string>& groups) {
  constexpr std::int64_t kDoubles = sizeof(kernels::MeasurePartial) / sizeof(double);
  constexpr std::int64_t kLargest = offsetof(kernels::MeasurePartial, largest) / sizeof(double);
  const at::Tensor magnitudes = sums.view({-1, kDoubles}).select(1, kLargest);
  const at::Tensor largest = uses_largest ? magnitudes.clone() : at::Tensor();
  constexpr const char* kNorms = "The norms of parameters and their changes";
  all_reduce_(sums, "sum", groups, kNorms);
  if (!uses_largest) return;
  all_reduce_(largest, "max", groups, kNorms);
  magnitudes.copy_(largest);
}

}  // namespace torchfuse::ops
