// SPDX-License-Identifier: BSD-3-Clause
// Runs K1 on a list of gradients and says which elements each partial stands for, and what the
// partials are added to.
#pragma once

#include <algorithm>
#include <vector>

#include "gradient_list.h"
#include "kernels/multi_tensor_l2_norm.h"
#include "rows_on_device.h"

namespace torchfuse::kernels::testing {

/// Memory for the sums of a list's bundles. See Note [Bundles of partials].
class DeviceBundles {
 public:
  explicit DeviceBundles(std::int64_t partials)
      : sums_(DeviceArray<NormPartial>::unwritten(num_norm_bundles(partials))),
        arrivals_(std::vector<std::uint32_t>(num_norm_arrivals(partials), 0)) {}

  NormBundles get() const { return {sums_.data(), arrivals_.data()}; }
  std::vector<NormPartial> sums() const { return sums_.to_host(); }
  std::vector<std::uint32_t> arrivals() const { return arrivals_.to_host(); }

  /// After a list: what a next one begins with.
  void expect_ready() const {
    EXPECT_EQ(arrivals(), std::vector<std::uint32_t>(arrivals().size(), 0));
    arrivals_.expect_margins_intact();
    sums_.expect_margins_intact();
  }

  void expect_accesses(unsigned reads, unsigned writes) const {
    sums_.expect_accesses(reads, writes);
  }

 private:
  DeviceArray<NormPartial> sums_;
  DeviceArray<std::uint32_t> arrivals_;
};

inline bool same_bits(const std::vector<NormPartial>& a, const std::vector<NormPartial>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
}

/// The sums of the bundles of these partials, in the order in which a warp adds: halves onto
/// halves.
inline std::vector<NormPartial> added_in_bundles(const std::vector<NormPartial>& partials) {
  std::vector<NormPartial> sums;
  for (std::size_t first = 0; first < partials.size(); first += kNormBundle) {
    NormPartial lanes[kNormBundle] = {};
    const std::size_t rest = partials.size() - first;
    std::copy_n(&partials[first], std::min<std::size_t>(rest, kNormBundle), lanes);
    for (std::size_t half = kNormBundle / 2; half > 0; half /= 2) {
      for (std::size_t lane = 0; lane < half; ++lane)
        lanes[lane] = lanes[lane] + lanes[lane + half];
    }
    sums.push_back(lanes[0]);
  }
  return sums;
}

/// Launches without a prologue, with rows by value or on the device. Every chunk must be written
/// once and every gradient read once, and every partial must be in the sum of its bundle.
inline std::vector<NormPartial> partials_of(const GradientList& list,
                                            std::int64_t elements = kNormChunk,
                                            bool rows_on_device = false) {
  list.upload();
  const Rows rows = list.device_rows();
  const auto chunk_offsets = list.chunk_offsets(elements);
  const auto partials = DeviceArray<NormPartial>::unwritten(chunk_offsets.back());
  const DeviceBundles bundles(chunk_offsets.back());
  bool done = true;
  L2NormArgs args{list.table(rows), chunk_offsets.data(), partials.data(), elements};
  const RowsOnDevice kept(args.tensors, chunk_offsets.data(), elements);
  if (rows_on_device) args.tensors.device = kept.get();
  expect_ok(multi_tensor_l2_norm_cuda(args, bundles.get(), nullptr, &done, stream()));
  EXPECT_FALSE(done);
  partials.expect_margins_intact();
  partials.expect_accesses(1, 1);
  bundles.expect_accesses(0, 1);
  bundles.expect_ready();
  EXPECT_TRUE(same_bits(bundles.sums(), added_in_bundles(partials.to_host())));
  list.expect_accesses(1, 0);
  list.expect_unchanged();
  return partials.to_host();
}

/// Calls visit(row, first, stop, chunk) for the elements [first, stop) of every chunk.
template <class Visit>
void for_each_chunk(const GradientList& list, Visit visit, std::int64_t elements = kNormChunk) {
  std::size_t chunk = 0;
  for (const GradientList::Row& row : list.rows()) {
    for (std::int64_t first = 0; first < row.numel; first += elements) {
      visit(row, first, std::min(first + elements, row.numel), chunk++);
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
