// SPDX-License-Identifier: BSD-3-Clause
// Runs K1 on a list of gradients and says which elements each partial stands for.
#pragma once

#include <algorithm>
#include <vector>

#include "gradient_list.h"
#include "kernels/multi_tensor_l2_norm.h"

namespace torchfuse::kernels::testing {

/// Launches without a prologue. Every slot must be written once and every gradient read once.
inline std::vector<NormPartial> partials_of(const GradientList& list) {
  list.upload();
  const Rows rows = list.device_rows();
  const auto chunk_offsets = list.chunk_offsets();
  const auto partials = DeviceArray<NormPartial>::unwritten(chunk_offsets.back());
  bool done = true;
  const Status status = multi_tensor_l2_norm_cuda(
      {list.table(rows), chunk_offsets.data(), partials.data()}, nullptr, nullptr, &done, stream());
  EXPECT_TRUE(status.ok()) << status.what;
  synchronize();
  EXPECT_FALSE(done);
  partials.expect_margins_intact();
  partials.expect_accesses(0, 1);
  list.expect_accesses(1, 0);
  list.expect_unchanged();
  return partials.to_host();
}

/// Calls visit(row, first, stop, slot) for the elements [first, stop) of every slot.
template <class Visit>
void for_each_slot(const GradientList& list, Visit visit) {
  std::size_t slot = 0;
  for (const GradientList::Row& row : list.rows()) {
    for (std::int64_t first = 0; first < row.numel; first += kNormChunk) {
      visit(row, first, std::min(first + kNormChunk, row.numel), slot++);
    }
  }
}

/// The largest finite number of each format.
inline double largest(DType dtype) {
  if (dtype == DType::kFloat16) return 65504.0;
  if (dtype == DType::kBFloat16) return 0x1.fep127;
  return dtype == DType::kFloat32 ? 0x1.fffffep127 : std::numeric_limits<double>::max();
}

}  // namespace torchfuse::kernels::testing
