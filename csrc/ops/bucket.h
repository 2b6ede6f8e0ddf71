// SPDX-License-Identifier: BSD-3-Clause
// The host side of a kernels::TensorTable: rows of one device and dtype tuple, refilled every step.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/common/tensor_table.h"
#include "kernels/multi_tensor_l2_norm.h"
#include "ops/launch/kept_tables.h"

namespace torchfuse::ops {

struct BucketKey {
  c10::Device device{c10::kCPU};
  kernels::DType param = kernels::DType::kFloat32;
  kernels::DType grad = kernels::DType::kFloat32;
  std::array<kernels::DType, kernels::kMaxStates> states{};
  bool has_master = false;
  bool has_remainder = false;
  bool stochastic = false;
  bool has_ema = false;
  bool clip_apart = false;         ///< whether the tensors have a norm of their own
  std::int32_t sharding = kWhole;  ///< index of the tensors' sharding

  static constexpr std::int32_t kWhole = -1;  ///< not sharded

  bool operator==(const BucketKey&) const = default;
  /// Orders buckets of one device, in the same way in all processes whose parameters have the same
  /// shardings in the same order.
  bool operator<(const BucketKey& other) const {
    const auto parts = [](const BucketKey& key) {
      return std::tie(key.clip_apart, key.sharding, key.param, key.grad, key.states, key.has_master,
                      key.has_remainder, key.stochastic, key.has_ema);
    };
    return parts(*this) < parts(other);
  }
};

/// A parameter's sizes and strides, in memory of the plan, and its number.
struct TensorLayout {
  c10::IntArrayRef sizes;
  c10::IntArrayRef strides;
  std::int64_t index = 0;          ///< the parameter's number, equal in all processes
  std::int64_t name_checksum = 0;  ///< of a sharded parameter; 0: unknown
};

struct Bucket {
  BucketKey key;
  std::vector<kernels::TensorRow> rows;
  std::vector<TensorLayout> layouts;           ///< one per row, for algorithms over matrices
  std::vector<std::int64_t> offsets{0};        ///< prefix sums of numel
  std::int64_t chunk = kernels::kNormChunk;    ///< elements per partial sum of a norm
  std::vector<std::int64_t> chunk_offsets{0};  ///< prefix sums of chunk counts: see divide()
  std::uint64_t seed = 0;                      ///< seed of stochastic rounding
  kernels::EmaParams ema;                      ///< used with has_ema
  /// Process groups over which the tensors are sharded; null if the tensors are not sharded.
  const std::vector<std::string>* shard_groups = nullptr;
  /// Process group over which sharded matrices are exchanged; null if the tensors are not sharded.
  const std::string* exchange_group = nullptr;
  KeptTables kept;  ///< used on CUDA devices

  void clear() {
    rows.clear();
    layouts.clear();
    offsets.resize(1);
    chunk_offsets.resize(1);
  }

  void add(const kernels::TensorRow& row) {
    rows.push_back(row);
    offsets.push_back(offsets.back() + row.numel);
  }

  /// Divides the added rows into chunks. `total` is the element count over all rows on the device.
  void divide(std::int64_t total) {
    chunk = key.device.is_cuda() ? kernels::norm_chunk_on_cuda(total) : kernels::kNormChunk;
    chunk_offsets.resize(1);
    chunk_offsets.reserve(rows.size() + 1);
    for (const kernels::TensorRow& row : rows) {
      chunk_offsets.push_back(chunk_offsets.back() + kernels::num_norm_chunks(row.numel, chunk));
    }
  }

  /// Must be called after divide() in every step on a CUDA device.
  void keep_rows() { kept.follow(key.device, table(), chunk_offsets, chunk); }

  kernels::TensorTable table() const {
    kernels::TensorTable table;
    table.rows = rows.data();
    table.offsets = offsets.data();
    table.count = static_cast<std::int64_t>(rows.size());
    table.param = key.param;
    table.grad = key.grad;
    std::copy(key.states.begin(), key.states.end(), table.state);
    table.has_master = key.has_master;
    table.has_remainder = key.has_remainder;
    table.stochastic = key.stochastic;
    table.seed = seed;
    table.has_ema = key.has_ema;
    table.ema = ema;
    table.device = kept.for_update();
    return table;
  }

  std::int64_t num_partials() const { return chunk_offsets.back(); }

  /// Returns how many sums the prologue adds. On a CUDA device, K1 has already added the partials
  /// in bundles.
  std::int64_t num_sums() const {
    return key.device.is_cuda() ? kernels::num_norm_bundles(num_partials()) : num_partials();
  }
};

/// Finds buckets by key. Few keys exist at a time, so a linear search is enough. The bucket found
/// last is tried first.
class Buckets {
 public:
  void clear() {
    for (Bucket& bucket : buckets_) bucket.clear();
  }

  Bucket& of(const BucketKey& key) {
    if (last_ < buckets_.size() && buckets_[last_].key == key) return buckets_[last_];
    for (last_ = 0; last_ < buckets_.size(); ++last_) {
      if (buckets_[last_].key == key) return buckets_[last_];
    }
    buckets_.emplace_back();
    buckets_.back().key = key;
    return buckets_.back();
  }

  std::vector<Bucket>& all() { return buckets_; }

 private:
  std::vector<Bucket> buckets_;
  std::size_t last_ = 0;
};

}  // namespace torchfuse::ops
