// SPDX-License-Identifier: BSD-3-Clause
#include "ops/arrivals.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "ops/backend.h"

namespace torchfuse::ops {

void Arrivals::put_away() {
  if (captured_) seen_by_captures_.push_back(std::move(kept_));
  kept_.reset();
  captured_ = false;
}

void Arrivals::forget() {
  put_away();
  reserved_.reset();
}

void Arrivals::reserve(std::int64_t count, const c10::Device& device) {
  const bool enough = kept_.defined() && kept_.device() == device && kept_.numel() >= count;
  const bool capturing = is_capturing(device);
  if (enough) {
    captured_ = captured_ || capturing;
    reserved_ = kept_;
    return;
  }
  reserved_ = at::zeros({count}, at::TensorOptions().dtype(at::kInt).device(device));
  if (capturing) return;
  put_away();
  kept_ = reserved_;
}

namespace {

struct OfStreams {
  std::mutex mutex;
  std::map<std::pair<c10::DeviceIndex, kernels::Stream>, at::Tensor> counters;
};

/// Never destroyed: the device may be gone by then.
OfStreams& of_streams() {
  static auto* const all = new OfStreams();
  return *all;
}

}  // namespace

at::Tensor zeroed_arrivals(const c10::Device& device, kernels::Stream stream, std::int64_t count) {
  const auto options = at::TensorOptions().device(device).dtype(at::kInt);
  if (is_capturing(device)) return at::zeros({count}, options);
  OfStreams& all = of_streams();
  const std::lock_guard<std::mutex> lock(all.mutex);
  at::Tensor& arrivals = all.counters[{device.index(), stream}];
  constexpr std::int64_t kLeast = 2048;
  if (!arrivals.defined() || arrivals.numel() < count) {
    arrivals = at::zeros({std::max(count, kLeast)}, options);
  }
  return arrivals;
}

void forget_arrivals(const c10::Device& device, kernels::Stream stream) {
  OfStreams& all = of_streams();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.counters.erase({device.index(), stream});
}

}  // namespace torchfuse::ops
