// SPDX-License-Identifier: BSD-3-Clause
// Keeps a long list's rows in device memory.
//
// Note [Device tables]
// A launch's arguments have room for about 420 rows (Note [Launch tables]), so a step over 10,000
// small tensors would need 35 launches. But most of a row is the same in every step. For long
// lists, `ops` keeps the rows on the device, and a launch passes only the changing data by value:
// the gradients' addresses. At 8 bytes per row, a launch has room for about 3,000 rows.
//
//   order    Non-empty rows are in the order of for_each_row. Blocks are numbered through the
//            entire table, and the table contains every block's last row. A launch is a span of
//            rows that begins at a multiple of eight, so that no block of small rows is divided.
//            An update from the end processes the last span first, and each span's last block
//            first. Small rows then come last.
//   bits     Blocks get and handle rows in the same way as in launches by value, so results are
//            bit-identical. An update handles only rows whose operands, gradients included, are all
//            aligned. Any other row has a null gradient in the span and is passed by value. The set
//            of such rows may differ between steps.
//   content  A table is never trusted: each step compares its rows with the uploaded rows
//            (ops/launch/kept_tables.h), which detects rows that moved, changed or were removed.
//            If a row differs, or if the step is captured in a graph, all rows are passed by value.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/common/blocks.h"
#include "kernels/common/tensor_table.h"

namespace torchfuse::kernels {

struct DeviceRow {
  TensorRow tensor;           ///< the gradient is ignored
  std::int64_t position;      ///< position in the list
  std::int64_t first_chunk;   ///< see L2NormArgs::chunk_offsets
  std::uint32_t first_block;  ///< first block in the table
};

/// The part of an uploaded table that kernels use.
struct DeviceTable {
  const DeviceRow* rows = nullptr;             ///< on the device
  const std::int32_t* row_of_block = nullptr;  ///< on the device: the last row of each block
  const DeviceRow* host_rows = nullptr;        ///< the same rows on the host
  std::int32_t count = 0;
  std::uint32_t blocks = 0;
  std::uint32_t chunk = 0;  ///< elements per block
};

/// The contents of a table.
struct HostTable {
  std::vector<DeviceRow> rows;
  std::vector<std::int32_t> row_of_block;
  std::uint32_t chunk = 0;
};

inline HostTable make_host_table(const TensorTable& tensors, const std::int64_t* chunk_offsets,
                                 std::uint32_t chunk) {
  HostTable table;
  table.chunk = chunk;
  cuda::BlockCounter counter;
  counter.reset();
  cuda::for_each_row(tensors, [&](std::int64_t i) {
    const auto row = static_cast<std::int32_t>(table.rows.size());
    const std::uint32_t first = counter.take(tensors.rows[i].numel, chunk);
    table.rows.push_back({tensors.rows[i], i, chunk_offsets[i], first});
    table.row_of_block.resize(counter.blocks);
    std::fill(table.row_of_block.begin() + first, table.row_of_block.end(), row);
    return Status{};
  });
  return table;
}

/// Returns the update's chunk size for a list with `total` elements. All update kernels' blocks
/// handle a divisor of this number of elements at a time.
inline std::uint32_t update_chunk(std::int64_t total) { return cuda::choose_chunk(total, 2048); }

}  // namespace torchfuse::kernels
