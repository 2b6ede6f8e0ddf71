// SPDX-License-Identifier: BSD-3-Clause
// Device tables of rows that have not changed since the previous step.
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

/// A device table and the memory that the table points to.
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

/// The device tables of a list that rarely changes between steps: see Note [Device tables].
///
/// Rows are uploaded when a second consecutive step uses them. A list that changes in every step is
/// therefore never uploaded. An op's list is never uploaded either, because an op runs a single
/// step. Tables belong to the stream on which they were uploaded. On that stream, the upload
/// precedes the steps that read the tables, and any reuse of the memory comes after the last of
/// these steps. A step on another stream gets no tables. A capture gets no tables, because every
/// replay would read them.
class KeptTables {
 public:
  /// Compares the list with the previous step's list. Must be called before every step, with the
  /// device set.
  void follow(const c10::Device& device, const kernels::TensorTable& tensors,
              const std::vector<std::int64_t>& chunk_offsets, std::int64_t norm_chunk);

  /// The device tables, or null if the step's launches pass their rows by value.
  const kernels::DeviceTable* for_norm() const { return of_step_ ? norm_->get() : nullptr; }
  const kernels::DeviceTable* for_update() const { return of_step_ ? update_->get() : nullptr; }

 private:
  bool same(const kernels::TensorTable& tensors, std::int64_t norm_chunk) const;

  std::vector<kernels::TensorRow> rows_;  ///< rows of the last step that was not captured
  std::int64_t norm_chunk_ = 0;
  kernels::Stream stream_{};
  std::optional<UploadedTable> norm_;
  std::optional<UploadedTable> update_;
  bool of_step_ = false;  ///< whether this step may use the tables
};

}  // namespace torchfuse::ops
