// SPDX-License-Identifier: BSD-3-Clause
// Counters of arrived blocks. Kernels expect zeros and leave zeros, so the counters are cleared
// only once.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "kernels/common/stream.h"

namespace torchfuse::ops {

/// One caller's arrival counters on one device, kept between launches.
class Arrivals {
 public:
  /// Provides at least `count` counters. If a capture needs more counters than are kept, the
  /// capture gets separate counters. Every replay clears them, because nothing outside the graph
  /// has.
  void reserve(std::int64_t count, const c10::Device& device);

  /// Must be called when a launch has failed, because the counters' values are then unknown.
  void forget();

  std::uint32_t* data() const { return static_cast<std::uint32_t*>(reserved_.mutable_data_ptr()); }

 private:
  void put_away();

  at::Tensor kept_;
  at::Tensor reserved_;    ///< kept_, or a capture's counters
  bool captured_ = false;  ///< whether a capture has used kept_
  std::vector<at::Tensor> seen_by_captures_;
};

/// Returns the stream's arrival counters, zeroed. Launches on one stream do not overlap, so one set
/// per stream is enough. A captured graph may be replayed on any stream, so each stream of a
/// capture gets separate counters. As long as the reserve for captures lasts, capture counters are
/// cleared in advance.
at::Tensor zeroed_arrivals(const c10::Device& device, kernels::Stream stream, std::int64_t count);

/// Must be called when a launch on the stream has failed.
void forget_arrivals(const c10::Device& device, kernels::Stream stream);

}  // namespace torchfuse::ops
