// SPDX-License-Identifier: BSD-3-Clause
// Lists of gradients for the kernels that read or scale them: on the device, and on the host for
// the oracles.
#pragma once

#include <numeric>
#include <utility>
#include <vector>

#include "device.h"
#include "kernels/multi_tensor_l2_norm.h"

namespace torchfuse::kernels::testing {

/// Elements of 16 bytes: of one vector, and of all misalignments.
inline std::int64_t elements_per_vector(DType dtype) {
  return 16 / static_cast<std::int64_t>(size_of(dtype));
}

/// The order of the launches to come, for kernels on `dtype`: fp64 is never flushed.
inline void set_order_for(DType dtype, std::uint64_t seed, std::uint32_t resident_blocks = 2) {
  set_order({seed, resident_blocks, dtype != DType::kFloat64});
}

/// Whole numbers whose squares a float adds without rounding, up to a thousand of them.
inline Buffer whole_numbers(DType dtype, std::int64_t numel, std::mt19937& random) {
  Buffer buffer(dtype, numel);
  for (std::int64_t i = 0; i < numel; ++i) {
    buffer.set(i, static_cast<double>(random() % 127 + 1) * (random() % 2 == 0 ? 1 : -1));
  }
  return buffer;
}

inline Buffer normal_numbers(DType dtype, std::int64_t numel, std::mt19937& random,
                             double scale = 100.0) {
  Buffer buffer(dtype, numel);
  buffer.fill_normal(random, scale);
  return buffer;
}

/// Sizes around vectors, warps, blocks and chunks, up to three of these.
inline std::vector<std::int64_t> border_sizes(std::int64_t chunk) {
  std::vector<std::int64_t> borders{2 * chunk, 3 * chunk};
  for (std::int64_t border = 4; border <= chunk; border *= 2) borders.push_back(border);
  std::vector<std::int64_t> sizes{0, 1, 2, 3 * chunk + 17};
  for (const std::int64_t border : borders) {
    for (const std::int64_t near : {-1, 0, 1}) sizes.push_back(border + near);
  }
  return sizes;
}

/// The same number, up to the payload of a NaN.
inline bool same_value(double a, double b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b));
}

class GradientList {
 public:
  using Guard = DeviceMemory::Guard;

  struct Row {
    std::size_t memory;  ///< index of the allocation
    std::int64_t begin;  ///< in it
    std::int64_t numel;
  };

  explicit GradientList(DType dtype) : dtype_(dtype) {}

  /// One tensor with forbidden memory on both sides.
  void add(const Buffer& content, std::int64_t offset = 0, Guard guard = Guard::kEnd) {
    add_packed(content, {content.numel()}, offset, guard);
  }

  /// Tensors of these sizes, one directly behind the other.
  void add_packed(const Buffer& content, const std::vector<std::int64_t>& sizes,
                  std::int64_t offset = 0, Guard guard = Guard::kEnd) {
    std::int64_t begin = 0;
    for (const std::int64_t numel : sizes) {
      rows_.push_back({device_.size(), begin, numel});
      begin += numel;
    }
    device_.emplace_back(content, offset, guard);
    host_.push_back(content);
  }

  DType dtype() const { return dtype_; }
  const std::vector<Row>& rows() const { return rows_; }
  const std::vector<DeviceTensor>& device() const { return device_; }
  const std::vector<Buffer>& host() const { return host_; }
  double get(const Row& row, std::int64_t i) const { return host_[row.memory].get(row.begin + i); }

  /// The list in another order: row i is what row order[i] was.
  void reorder(const std::vector<std::size_t>& order) {
    std::vector<Row> rows;
    for (const std::size_t i : order) rows.push_back(rows_[i]);
    rows_ = std::move(rows);
  }

  Rows device_rows() const {
    return rows_in([&](std::size_t memory) { return device_[memory].data(); });
  }
  /// The same rows in other memory, one buffer for each allocation.
  Rows rows_in(std::vector<Buffer>& host) const {
    return rows_in([&](std::size_t memory) { return host[memory].data(); });
  }
  TensorTable table(const Rows& rows) const { return rows.table(dtype_, dtype_, dtype_); }

  std::vector<std::int64_t> chunk_offsets(std::int64_t chunk = kNormChunk) const {
    std::vector<std::int64_t> chunk_offsets{0};
    for (const Row& row : rows_)
      chunk_offsets.push_back(chunk_offsets.back() + num_norm_chunks(row.numel, chunk));
    return chunk_offsets;
  }

  /// Puts the contents back, and the counts of accesses to zero.
  void upload() const {
    for (std::size_t i = 0; i < device_.size(); ++i) device_[i].upload(host_[i].data());
  }

  void expect_accesses(unsigned reads, unsigned writes) const {
    for (const DeviceTensor& tensor : device_) {
      tensor.expect_margins_intact();
      tensor.expect_accesses(reads, writes);
    }
  }

  void expect_unchanged() const {
    for (std::size_t i = 0; i < device_.size(); ++i) {
      EXPECT_TRUE(device_[i].to_host() == host_[i]) << "allocation " << i;
    }
  }

 private:
  template <class Data>
  Rows rows_in(Data data) const {
    Rows result;
    for (const Row& row : rows_) {
      TensorRow entry;
      // As torch has it, an empty tensor points nowhere.
      if (row.numel != 0) {
        entry.grad = static_cast<char*>(data(row.memory)) +
                     row.begin * static_cast<std::int64_t>(size_of(dtype_));
      }
      entry.numel = row.numel;
      result.add(entry);
    }
    return result;
  }

  DType dtype_;
  std::vector<Row> rows_;
  std::vector<DeviceTensor> device_;
  std::vector<Buffer> host_;
};

/// Calls visit(list) for whole numbers in lists of every length and every dtype.
template <class Visit>
void for_each_length(std::uint32_t seed, const Visit& visit) {
  std::mt19937 random(seed);
  const auto visit_sizes = [&](DType dtype, const std::vector<std::int64_t>& sizes) {
    GradientList list(dtype);
    const std::int64_t total = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
    list.add_packed(whole_numbers(dtype, total, random), sizes, 1);
    set_order_for(dtype, random());
    visit(list);
  };
  for (const DType dtype : kEveryDType) {
    std::vector<std::int64_t> every(530);
    std::iota(every.begin(), every.end(), 0);
    visit_sizes(dtype, every);
    // Tensors for warps, for blocks, and empty ones in turn; several launches, each of which takes
    // some 1,090 of a norm and 1,600 of others.
    std::vector<std::int64_t> mixed(dtype == DType::kFloat16 ? 6000 : 2000);
    for (auto& numel : mixed) numel = static_cast<std::int64_t>(random() % 3 * (random() % 30));
    for (std::size_t i = 0; i < mixed.size(); i += 50) mixed[i] += 513;
    mixed[mixed.size() / 2] = 2 * kNormChunk + 3;
    visit_sizes(dtype, mixed);
    for (const std::size_t length : {1, 7, 8, 9, 16, 17}) {
      visit_sizes(dtype, std::vector<std::int64_t>(length, 3));
    }
  }
}

}  // namespace torchfuse::kernels::testing
