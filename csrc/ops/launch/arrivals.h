// SPDX-License-Identifier: BSD-3-Clause
// Counters of the blocks that have arrived, which kernels take as zero and leave as zero, so that
// they are cleared once.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "kernels/common/stream.h"

namespace torchfuse::ops {

/// Those of one caller on one device, kept between its launches.
class Arrivals {
 public:
  /// At least `count` of them. A capture that needs more than there are gets its own, which every
  /// replay clears: outside of it nothing has.
  void reserve(std::int64_t count, const c10::Device& device);

  /// To be called when a launch has failed: nobody knows what they are now.
  void forget();

  std::uint32_t* data() const { return static_cast<std::uint32_t*>(reserved_.mutable_data_ptr()); }

 private:
  void put_away();

  at::Tensor kept_;
  at::Tensor reserved_;    ///< kept_, or those of a capture
  bool captured_ = false;  ///< whether a capture has used kept_
  std::vector<at::Tensor> seen_by_captures_;
};

/// Those of whoever launches on a stream, whose launches do not overlap: one set for each. A graph
/// that is being captured may run on any stream, and gets counters of its own, for each stream of
/// the capture. They are cleared in advance, as long as the reserve for captures lasts.
at::Tensor zeroed_arrivals(const c10::Device& device, kernels::Stream stream, std::int64_t count);

/// To be called when a launch on the stream has failed.
void forget_arrivals(const c10::Device& device, kernels::Stream stream);

}  // namespace torchfuse::ops
