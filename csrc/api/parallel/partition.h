// SPDX-License-Identifier: BSD-3-Clause
// Parameters in flat memory that is split evenly over the processes of a group.
//
// Note [Partition] in python/torchfuse/parallel/_partition.py says how; both languages cut alike.
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

/// A flat tensor of a device and a dtype, in equal parts of `part` elements.
struct FlatPlan {
  at::TensorOptions options;
  std::int64_t numel;
  std::int64_t part;
};

/// The places of all parameters, in their order, and the flat tensors: one for each device and
/// dtype, or several, where the gradients of each are reduced together.
class Partition {
 public:
  /// Plans flat tensors for these parameters; the same on every rank but for `rank`.
  /// @param members of each flat tensor, in their order there: all of one device and dtype.
  Partition(const std::vector<at::Tensor>& params,
            const std::vector<std::vector<std::size_t>>& members, std::int64_t rank,
            std::int64_t size);

  const std::vector<Place>& places() const { return places_; }
  const std::vector<FlatPlan>& flats() const { return flats_; }
  /// Where this process's elements of a flat tensor begin.
  std::int64_t first_of(std::size_t flat) const { return rank_ * flats_[flat].part; }
  /// Elements [begin, end) of a parameter that this process owns; empty if it has none.
  std::pair<std::int64_t, std::int64_t> own(std::size_t index) const { return own(index, rank_); }
  /// The same for another process.
  std::pair<std::int64_t, std::int64_t> own(std::size_t index, std::int64_t rank) const;
  /// This process's elements of a tensor that lies in memory as parameter `index` does: a view of
  /// one dimension.
  at::Tensor part_of(std::size_t index, const at::Tensor& tensor) const;
  /// Parameter `index`, or a state of it, in flat memory.
  at::Tensor view_of(std::size_t index, const at::Tensor& flat, const at::Tensor& param) const;

 private:
  std::vector<Place> places_;
  std::vector<FlatPlan> flats_;
  std::int64_t rank_;
};

/// The tensor itself if its elements lie in memory in the parameter's order, else a copy.
at::Tensor laid_out_like(const at::Tensor& param, const at::Tensor& tensor);

}  // namespace torchfuse::parallel
