// SPDX-License-Identifier: BSD-3-Clause
#include "api/parallel/partition.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace torchfuse::parallel {

namespace {

/// Alignment of parameters and shards in bytes: a cache line, for vectorized access.
constexpr std::int64_t kLine = 64;

std::int64_t rounded(std::int64_t number, std::int64_t multiple) {
  return (number + multiple - 1) / multiple * multiple;
}

}  // namespace

Partition::Partition(const std::vector<at::Tensor>& params, std::int64_t rank, std::int64_t size)
    : rank_(rank) {
  for (const at::Tensor& param : params) {
    const at::TensorOptions options = param.options().requires_grad(false);
    auto flat = std::find_if(flats_.begin(), flats_.end(), [&](const FlatPlan& plan) {
      return plan.options.device() == options.device() && plan.options.dtype() == options.dtype();
    });
    if (flat == flats_.end()) flat = flats_.insert(flats_.end(), {options, 0, 0});
    places_.push_back(
        {static_cast<std::size_t>(flat - flats_.begin()), flat->numel, param.numel()});
    const auto itemsize = static_cast<std::int64_t>(options.dtype().itemsize());
    flat->numel += rounded(param.numel(), kLine / itemsize);
  }
  for (FlatPlan& flat : flats_) {
    const auto itemsize = static_cast<std::int64_t>(flat.options.dtype().itemsize());
    flat.shard = rounded((flat.numel + size - 1) / size, kLine / itemsize);
    flat.numel = flat.shard * size;
  }
}

std::pair<std::int64_t, std::int64_t> Partition::range(std::size_t index, std::int64_t rank) const {
  const Place& place = places_[index];
  const std::int64_t low = rank * flats_[place.flat].shard - place.begin;
  const std::int64_t begin = std::clamp<std::int64_t>(low, 0, place.numel);
  return {begin, std::clamp(low + flats_[place.flat].shard, begin, place.numel)};
}

at::Tensor Partition::shard_of(std::size_t index, const at::Tensor& tensor) const {
  const auto [begin, end] = range(index, rank_);
  return tensor.as_strided({end - begin}, {1}, tensor.storage_offset() + begin);
}

at::Tensor laid_out_like(const at::Tensor& param, const at::Tensor& tensor) {
  if (tensor.strides() == param.strides() || tensor.numel() <= 1) return tensor;
  return at::empty_like(param, tensor.options().requires_grad(false)).copy_(tensor);
}

}  // namespace torchfuse::parallel
