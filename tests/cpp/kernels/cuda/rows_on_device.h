// SPDX-License-Identifier: BSD-3-Clause
// A device table as `ops` makes them: see Note [Device tables].
#pragma once

#include <optional>
#include <utility>

#include "device.h"
#include "kernels/common/device_table.h"

namespace torchfuse::kernels::testing {

class RowsOnDevice {
 public:
  RowsOnDevice(const TensorTable& tensors, const std::int64_t* chunk_offsets, std::int64_t chunk)
      : host_(make_host_table(tensors, chunk_offsets, static_cast<std::uint32_t>(chunk))) {
    table_.count = static_cast<std::int32_t>(host_.rows.size());
    table_.blocks = static_cast<std::uint32_t>(host_.row_of_block.size());
    table_.chunk = host_.chunk;
    if (table_.count == 0) return;
    // Gradients are where the launch says.
    for (DeviceRow& row : host_.rows) row.tensor.grad = nullptr;
    rows_.emplace(host_.rows);
    row_of_block_.emplace(host_.row_of_block);
    table_.rows = rows_->data();
    table_.row_of_block = row_of_block_->data();
    table_.host_rows = host_.rows.data();
  }

  const DeviceTable* get() const { return &table_; }

 private:
  HostTable host_;
  std::optional<DeviceArray<DeviceRow>> rows_;
  std::optional<DeviceArray<std::int32_t>> row_of_block_;
  DeviceTable table_;
};

}  // namespace torchfuse::kernels::testing
