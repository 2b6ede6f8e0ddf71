// SPDX-License-Identifier: BSD-3-Clause
#include "api/parallel/gradient_parts.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cstdint>
#include <utility>

namespace torchfuse::parallel {

GradientParts::GradientParts(std::vector<at::Tensor> params, std::vector<at::Tensor> parts,
                             Partition partition)
    : params_(std::move(params)), parts_(std::move(parts)), partition_(std::move(partition)) {}

void GradientParts::add(std::size_t index, const at::Tensor& own) {
  const at::NoGradGuard no_grad;
  const auto [begin, end] = partition_.own(index);
  // An empty part needs one too, so that all ranks count alike.
  const Place& place = partition_.places()[index];
  const std::int64_t first =
      begin == end ? 0 : place.begin + begin - partition_.first_of(place.flat);
  // Not a view for autograd, which would refuse the detach_() of torch's zero_grad().
  at::Tensor added = at::empty({0}, own.options());
  added.set_(own.storage(), own.storage_offset() + first, {end - begin}, {1});
  at::Tensor& grad = parts_[index].mutable_grad();
  if (grad.defined()) {
    grad.add_(added);
  } else {
    grad = added;
  }
}

}  // namespace torchfuse::parallel
