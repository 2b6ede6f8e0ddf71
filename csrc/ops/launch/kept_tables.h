// SPDX-License-Identifier: BSD-3-Clause
// Rows that a step finds on the device, because they are those of the step before.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/common/device_table.h"
#include "kernels/common/stream.h"
#include "kernels/common/tensor_table.h"

namespace torchfuse::ops {

/// A device table and its memory.
class UploadedTable {
 public:
  UploadedTable(const c10::Device& device, kernels::HostTable contents);
  UploadedTable(UploadedTable&&) = default;
  UploadedTable& operator=(UploadedTable&&) = default;
  const kernels::DeviceTable* get() const { return &table_; }

 private:
  std::vector<kernels::DeviceRow> host_rows_;
  at::Tensor rows_;
  at::Tensor row_of_block_;
  kernels::DeviceTable table_;
};

/// The device tables of a list that changes little from step to step: see Note [Device tables].
///
/// Rows are uploaded when a second step in sequence has them, so a list that never stays the same
/// is never uploaded, and nor is that of an op, which has one step. Tables belong to the stream on
/// which they were uploaded: there the upload comes before the steps that read it, and whatever
/// reuses the memory comes behind. A step on another stream finds none. Nor does a capture, whose
/// graph would read them for ever.
class KeptTables {
 public:
  /// Compares the list with that of the last step; before every step, with the device set.
  void follow(const c10::Device& device, const kernels::TensorTable& tensors,
              const std::vector<std::int64_t>& chunk_offsets, std::int64_t norm_chunk);

  /// Null: the step's launches carry their rows by value.
  const kernels::DeviceTable* for_norm() const { return of_step_ ? norm_->get() : nullptr; }
  const kernels::DeviceTable* for_update() const { return of_step_ ? update_->get() : nullptr; }

 private:
  bool same(const kernels::TensorTable& tensors, std::int64_t norm_chunk) const;

  std::vector<kernels::TensorRow> rows_;  ///< of the last step that was not captured
  std::int64_t norm_chunk_ = 0;
  kernels::Stream stream_{};
  std::optional<UploadedTable> norm_;
  std::optional<UploadedTable> update_;
  bool of_step_ = false;  ///< whether this step may use them
};

}  // namespace torchfuse::ops
