// SPDX-License-Identifier: BSD-3-Clause
// Memory that outlives a step.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

namespace torchfuse::ops {

/// Doubles on one device, kept between steps. The memory grows and never shrinks. A captured graph
/// keeps writing to the captured addresses, so memory that a capture used is kept when the
/// workspace grows.
class Workspace {
 public:
  /// Provides at least `doubles` doubles with arbitrary values.
  void reserve(std::int64_t doubles, const c10::Device& device);

  double* data() const { return memory_.mutable_data_ptr<double>(); }

 private:
  at::Tensor memory_;
  bool captured_ = false;  ///< whether a capture has used memory_
  std::vector<at::Tensor> seen_by_captures_;
};

}  // namespace torchfuse::ops
