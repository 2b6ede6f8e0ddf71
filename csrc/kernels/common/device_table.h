// SPDX-License-Identifier: BSD-3-Clause
// The rows of a long list in memory of the device.
//
// Note [Device tables]
// Arguments of a launch have room for some 420 rows (Note [Launch tables]), so that a step over
// 10,000 small tensors would take 35 launches. But nearly all of a row is the same in every step.
// For long lists `ops` keeps the rows on the device, and a launch carries by value what may differ:
// the gradients' addresses, 8 bytes for each row, of which it has room for some 3,000.
//
//   order    Rows that are not empty stand in the order of for_each_row; blocks are numbered
//            through the whole table, and each one's last row is looked up. A launch is a span of
//            rows that begins at a multiple of eight, so that no block of small rows is divided.
//            An update from the end takes the last span first, and the last block of each first:
//            small rows come last then.
//   bits     Rows are dealt out and handled as those of launches by value are, so results are the
//            same. An update takes rows whose operands are all aligned, gradients included. Any
//            other has a null for its gradient in the span, and goes by value; which ones those are
//            may differ from step to step.
//   content  A table is never trusted: each step compares its rows with those that were uploaded
//            (ops/launch/kept_tables.h), so whatever moves, changes or is no longer there is seen.
//            A step that differs, and a step that is captured in a graph, go by value.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/common/blocks.h"
#include "kernels/common/tensor_table.h"

namespace torchfuse::kernels {

struct DeviceRow {
  TensorRow tensor;           ///< its gradient is not looked at
  std::int64_t position;      ///< in the list
  std::int64_t first_chunk;   ///< see L2NormArgs::chunk_offsets
  std::uint32_t first_block;  ///< in the table
};

/// What kernels use of a table that is uploaded.
struct DeviceTable {
  const DeviceRow* rows = nullptr;             ///< on the device
  const std::int32_t* row_of_block = nullptr;  ///< on the device: the last row of each block
  const DeviceRow* host_rows = nullptr;        ///< the same rows on the host
  std::int32_t count = 0;
  std::uint32_t blocks = 0;
  std::uint32_t chunk = 0;  ///< elements of a block
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

/// Chunks of the updates of a list of `total` elements: a multiple of what a block of any of them
/// handles at a time.
inline std::uint32_t update_chunk(std::int64_t total) { return cuda::choose_chunk(total, 2048); }

}  // namespace torchfuse::kernels
