// SPDX-License-Identifier: BSD-3-Clause
#include "api/parallel/buckets.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

namespace torchfuse::parallel {

namespace {

struct OpenBucket {
  std::vector<std::size_t> places;  ///< members' positions in `order`
  std::int64_t bytes = 0;
  bool first = true;
};

using Kind = std::tuple<at::ScalarType, c10::DeviceType, c10::DeviceIndex>;

/// Alignment for the widest kernel accesses. torch's allocators align at least as much.
constexpr std::int64_t kAlignment = 16;

/// Returns the offset of each member in the bucket, in elements, and then the end of the last
/// member.
std::vector<std::int64_t> place_members(const std::vector<at::Tensor>& parameters,
                                        const std::vector<std::size_t>& members) {
  std::vector<std::int64_t> offsets;
  std::int64_t end = 0;
  for (const std::size_t member : members) {
    const at::Tensor& parameter = parameters[member];
    const std::int64_t step =
        std::max<std::int64_t>(kAlignment / static_cast<std::int64_t>(parameter.itemsize()), 1);
    offsets.push_back((end + step - 1) / step * step);
    end = offsets.back() + parameter.numel();
  }
  offsets.push_back(end);
  return offsets;
}

}  // namespace

std::vector<std::vector<std::size_t>> plan_buckets(const std::vector<at::Tensor>& parameters,
                                                   const std::vector<std::size_t>& order,
                                                   const BucketSizes& sizes) {
  std::vector<std::vector<std::size_t>> buckets;
  std::map<Kind, OpenBucket> open;
  for (std::size_t place = 0; place < order.size(); ++place) {
    const at::Tensor& parameter = parameters[order[place]];
    const c10::Device device = parameter.device();
    OpenBucket& bucket = open[{parameter.scalar_type(), device.type(), device.index()}];
    bucket.places.push_back(place);
    bucket.bytes += static_cast<std::int64_t>(parameter.nbytes());
    if (bucket.bytes < (bucket.first ? sizes.first : sizes.others)) continue;
    buckets.push_back(std::exchange(bucket.places, {}));
    bucket.bytes = 0;
    bucket.first = false;
  }
  for (auto& [kind, bucket] : open) {
    if (!bucket.places.empty()) buckets.push_back(std::move(bucket.places));
  }
  std::sort(buckets.begin(), buckets.end(),
            [](const auto& a, const auto& b) { return a.back() < b.back(); });
  for (auto& bucket : buckets) {
    for (std::size_t& place : bucket) place = order[place];
  }
  return buckets;
}

BucketMemory allocate_bucket(const std::vector<at::Tensor>& parameters,
                             const std::vector<std::size_t>& members) {
  const at::NoGradGuard no_grad;
  const std::vector<std::int64_t> offsets = place_members(parameters, members);
  BucketMemory memory;
  const auto options = parameters[members.front()].options().requires_grad(false);
  memory.flat = at::zeros({offsets.back()}, options);
  for (std::size_t place = 0; place < members.size(); ++place) {
    const at::Tensor& parameter = parameters[members[place]];
    // Build the view with set_(): torch's zero_grad() calls detach_(), which throws for views.
    at::Tensor view = at::empty({0}, options);
    const auto strides = parameter.is_non_overlapping_and_dense()
                             ? parameter.strides().vec()
                             : at::empty(parameter.sizes(), at::kMeta).strides().vec();
    view.set_(memory.flat.storage(), offsets[place], parameter.sizes(), strides);
    memory.views.push_back(std::move(view));
  }
  return memory;
}

}  // namespace torchfuse::parallel
