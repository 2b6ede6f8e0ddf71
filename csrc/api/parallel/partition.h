// SPDX-License-Identifier: BSD-3-Clause
// How ShardedOptimizer lays out and shards parameters.
//
// All parameters with equal device and dtype share a flat tensor, in group order. The flat tensor
// is split into equal shards, one per rank, so that one all-gather updates all ranks. A shard may
// begin and end within a parameter, and a parameter may extend over several shards.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace torchfuse::parallel {

/// Position of a parameter: elements [begin, begin + numel) of flat tensor number `flat`.
struct Place {
  std::size_t flat;
  std::int64_t begin;
  std::int64_t numel;
};

/// A flat tensor with `numel` elements, in equal shards of `shard` elements.
struct FlatPlan {
  at::TensorOptions options;
  std::int64_t numel;
  std::int64_t shard;
};

/// Positions of all parameters, in parameter order, and the flat tensors.
class Partition {
 public:
  /// Plans flat tensors for these parameters. The plan is equal on all ranks.
  Partition(const std::vector<at::Tensor>& params, std::int64_t rank, std::int64_t size);

  const std::vector<Place>& places() const { return places_; }
  const std::vector<FlatPlan>& flats() const { return flats_; }
  /// Returns the parameter's elements [begin, end), in memory order, that are in a rank's shard;
  /// begin == end if there are none.
  std::pair<std::int64_t, std::int64_t> range(std::size_t index, std::int64_t rank) const;
  /// Returns the local shard as a one-dimensional view into `tensor`, whose memory layout must
  /// match parameter `index`.
  at::Tensor shard_of(std::size_t index, const at::Tensor& tensor) const;

 private:
  std::vector<Place> places_;
  std::vector<FlatPlan> flats_;
  std::int64_t rank_;
};

/// Returns `tensor` unchanged if the memory layout matches `param`, otherwise a copy with that
/// layout.
at::Tensor laid_out_like(const at::Tensor& param, const at::Tensor& tensor);

}  // namespace torchfuse::parallel
