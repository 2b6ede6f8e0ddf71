// SPDX-License-Identifier: BSD-3-Clause
// How ShardedOptimizer lays out parameters and splits them over the ranks of a group.
//
// All parameters of a device and dtype lie in one flat tensor, in the order of the groups. It is
// split into equal shards, one for each rank, so that one all-gather updates all ranks. A shard may
// begin and end within a parameter, and a parameter may extend over several shards.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace torchfuse::parallel {

/// Where a parameter lies: elements [begin, begin + numel) of a flat tensor.
struct Place {
  std::size_t flat;
  std::int64_t begin;
  std::int64_t numel;
};

/// A flat tensor of `numel` elements, in equal shards of `shard` elements.
struct FlatPlan {
  at::TensorOptions options;
  std::int64_t numel;
  std::int64_t shard;
};

/// The places of all parameters, in their order, and the flat tensors.
class Partition {
 public:
  /// Plans flat tensors for these parameters; the same on every rank except for `rank`.
  Partition(const std::vector<at::Tensor>& params, std::int64_t rank, std::int64_t size);

  const std::vector<Place>& places() const { return places_; }
  const std::vector<FlatPlan>& flats() const { return flats_; }
  /// Returns which elements [begin, end) of a parameter, in the order of memory, lie in a rank's
  /// shard; begin == end if none do.
  std::pair<std::int64_t, std::int64_t> range(std::size_t index, std::int64_t rank) const;
  /// Returns this rank's elements of a tensor laid out in memory like parameter `index`: a view of
  /// one dimension.
  at::Tensor shard_of(std::size_t index, const at::Tensor& tensor) const;

 private:
  std::vector<Place> places_;
  std::vector<FlatPlan> flats_;
  std::int64_t rank_;
};

/// Returns the tensor itself if its elements lie in memory in the parameter's order, else a copy.
at::Tensor laid_out_like(const at::Tensor& param, const at::Tensor& tensor);

}  // namespace torchfuse::parallel
