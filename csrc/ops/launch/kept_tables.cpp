// SPDX-License-Identifier: BSD-3-Clause
#include "ops/launch/kept_tables.h"

#include <ATen/Functions.h>

#include <cstring>
#include <utility>

#include "ops/backend.h"

namespace torchfuse::ops {

namespace {

/// Minimum number of rows in a kept table. Shorter lists need at most two or three launches of each
/// kind.
constexpr std::int64_t kLeastRows = 1024;

/// Returns a copy on the device, without synchronizing the host.
template <class T>
at::Tensor uploaded(const std::vector<T>& values, const c10::Device& device) {
  const std::size_t bytes = values.size() * sizeof(T);
  const auto options = at::TensorOptions().dtype(at::kByte).pinned_memory(true);
  const at::Tensor staged = at::empty({static_cast<std::int64_t>(bytes)}, options);
  std::memcpy(staged.mutable_data_ptr(), values.data(), bytes);
  return staged.to(device, /*non_blocking=*/true);
}

}  // namespace

UploadedTable::UploadedTable(const c10::Device& device, kernels::HostTable contents)
    : host_rows_(std::move(contents.rows)),
      rows_(uploaded(host_rows_, device)),
      row_of_block_(uploaded(contents.row_of_block, device)) {
  table_.rows = static_cast<const kernels::DeviceRow*>(rows_.const_data_ptr());
  table_.row_of_block = static_cast<const std::int32_t*>(row_of_block_.const_data_ptr());
  table_.host_rows = host_rows_.data();
  table_.count = static_cast<std::int32_t>(host_rows_.size());
  table_.blocks = static_cast<std::uint32_t>(contents.row_of_block.size());
  table_.chunk = contents.chunk;
}

bool KeptTables::same(const kernels::TensorTable& tensors, std::int64_t norm_chunk) const {
  if (static_cast<std::int64_t>(rows_.size()) != tensors.count || norm_chunk != norm_chunk_) {
    return false;
  }
  for (std::int64_t i = 0; i < tensors.count; ++i) {
    if (!kernels::same_besides_grad(rows_[i], tensors.rows[i])) return false;
  }
  return true;
}

void KeptTables::follow(const c10::Device& device, const kernels::TensorTable& tensors,
                        const std::vector<std::int64_t>& chunk_offsets, std::int64_t norm_chunk) {
  of_step_ = false;
  if (is_capturing(device)) return;
  const kernels::Stream stream = current_stream(device);
  const bool keeps = tensors.count >= kLeastRows;
  if (!keeps || stream != stream_ || !same(tensors, norm_chunk)) {
    norm_.reset();
    update_.reset();
    rows_.assign(tensors.rows, tensors.rows + (keeps ? tensors.count : 0));
    norm_chunk_ = norm_chunk;
    stream_ = stream;
    return;
  }
  if (!update_) {
    const auto table = [&](std::int64_t chunk) {
      return kernels::make_host_table(tensors, chunk_offsets.data(),
                                      static_cast<std::uint32_t>(chunk));
    };
    norm_.emplace(device, table(norm_chunk));
    update_.emplace(device, table(kernels::update_chunk(tensors.total())));
  }
  of_step_ = true;
}

}  // namespace torchfuse::ops
