// SPDX-License-Identifier: BSD-3-Clause
// Memory that lives longer than a step.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

namespace torchfuse::ops {

/// Doubles on one device, kept between steps. They grow and never shrink. A captured graph goes on
/// writing to the addresses that it saw, so memory that a capture used outlives a larger one.
class Workspace {
 public:
  /// At least `doubles` of them, with any values.
  void reserve(std::int64_t doubles, const c10::Device& device);

  double* data() const { return memory_.mutable_data_ptr<double>(); }

 private:
  at::Tensor memory_;
  bool captured_ = false;  ///< whether a capture has used memory_
  std::vector<at::Tensor> seen_by_captures_;
};

}  // namespace torchfuse::ops
