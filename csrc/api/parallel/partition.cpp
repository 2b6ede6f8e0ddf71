// SPDX-License-Identifier: BSD-3-Clause
#include "api/parallel/partition.h"

#include <ATen/ATen.h>

#include <algorithm>

namespace torchfuse::parallel {

namespace {

/// Parameters begin at multiples of so many bytes, where kernels read and write whole vectors, and
/// parts at multiples of a cache line.
constexpr std::int64_t kParamAlignment = 16;
constexpr std::int64_t kLine = 64;

std::int64_t rounded(std::int64_t number, std::int64_t multiple) {
  return (number + multiple - 1) / multiple * multiple;
}

}  // namespace

Partition::Partition(const std::vector<at::Tensor>& params,
                     const std::vector<std::vector<std::size_t>>& members, std::int64_t rank,
                     std::int64_t size)
    : places_(params.size()), rank_(rank) {
  for (const std::vector<std::size_t>& of_flat : members) {
    const at::TensorOptions options = params[of_flat.front()].options().requires_grad(false);
    const auto itemsize = static_cast<std::int64_t>(options.dtype().itemsize());
    std::int64_t end = 0;
    for (const std::size_t index : of_flat) {
      const std::int64_t numel = params[index].numel();
      places_[index] = {flats_.size(), end, numel};
      end += rounded(numel, kParamAlignment / itemsize);
    }
    const std::int64_t part = rounded((end + size - 1) / size, kLine / itemsize);
    flats_.push_back({options, part * size, part});
  }
}

std::pair<std::int64_t, std::int64_t> Partition::own(std::size_t index, std::int64_t rank) const {
  const Place& place = places_[index];
  const std::int64_t low = rank * flats_[place.flat].part - place.begin;
  const std::int64_t begin = std::clamp<std::int64_t>(low, 0, place.numel);
  return {begin, std::clamp(low + flats_[place.flat].part, begin, place.numel)};
}

at::Tensor Partition::part_of(std::size_t index, const at::Tensor& tensor) const {
  const auto [begin, end] = own(index);
  return tensor.as_strided({end - begin}, {1}, tensor.storage_offset() + begin);
}

at::Tensor Partition::view_of(std::size_t index, const at::Tensor& flat,
                              const at::Tensor& param) const {
  return flat.as_strided(param.sizes(), param.strides(), places_[index].begin);
}

at::Tensor laid_out_like(const at::Tensor& param, const at::Tensor& tensor) {
  if (tensor.strides() == param.strides() || tensor.numel() <= 1) return tensor;
  return at::empty_like(param, tensor.options().requires_grad(false)).copy_(tensor);
}

}  // namespace torchfuse::parallel
