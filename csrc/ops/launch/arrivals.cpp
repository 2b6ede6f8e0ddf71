// SPDX-License-Identifier: BSD-3-Clause
#include "ops/launch/arrivals.h"

#include <ATen/Functions.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
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

/// A device and one of its streams.
using Place = std::pair<c10::DeviceIndex, kernels::Stream>;

constexpr std::int64_t kLeast = 2048;  ///< minimum number of counters per stream or capture
constexpr std::int64_t kReserved = 128 * kLeast;

/// A device's counters for captures. The counters are cleared once, outside any capture, because a
/// captured clearing would be part of every replay. Counters that a capture has taken stay with the
/// capture's graph.
struct Reserve {
  at::Tensor counters;
  std::int64_t taken = 0;
  c10::Event cleared{c10::DeviceType::CUDA};
};

struct OfCapture {
  std::uint64_t capture = 0;
  at::Tensor counters;
};

struct AllArrivals {
  std::mutex mutex;
  std::map<Place, at::Tensor> of_streams;
  std::map<Place, OfCapture> of_captures;
  std::map<c10::DeviceIndex, Reserve> reserves;
};

/// Never destroyed, because the device may already be shut down at process exit.
AllArrivals& all_arrivals() {
  static auto* const all = new AllArrivals();
  return *all;
}

/// Orders the device's current stream after the clearing of the reserve, which the first call
/// allocates. Replays also find the reserve cleared, because the program runs eager steps first,
/// and each eager stream calls this function.
void clear_reserve(Reserve& reserve, const c10::Device& device) {
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (reserve.counters.defined()) {
    reserve.cleared.block(stream);
    return;
  }
  reserve.counters = at::zeros({kReserved}, at::TensorOptions().device(device).dtype(at::kInt));
  reserve.cleared.record(stream);
}

/// Returns counters for one of a capture's streams. If the reserve does not exist or is used up,
/// the counters are allocated and cleared in the capture.
at::Tensor of_capture(AllArrivals& all, const c10::Device& device, kernels::Stream stream,
                      std::uint64_t capture, std::int64_t count) {
  OfCapture& known = all.of_captures[{device.index(), stream}];
  if (known.capture == capture && known.counters.numel() >= count) return known.counters;
  const std::int64_t wanted = std::max(count, kLeast);
  Reserve& reserve = all.reserves[device.index()];
  if (!reserve.counters.defined() || reserve.taken + wanted > kReserved) {
    return at::zeros({count}, at::TensorOptions().device(device).dtype(at::kInt));
  }
  known = {capture, reserve.counters.narrow(0, reserve.taken, wanted)};
  reserve.taken += wanted;
  return known.counters;
}

}  // namespace

at::Tensor zeroed_arrivals(const c10::Device& device, kernels::Stream stream, std::int64_t count) {
  AllArrivals& all = all_arrivals();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const std::optional<std::uint64_t> capture = current_capture(device);
  if (capture.has_value()) return of_capture(all, device, stream, *capture, count);
  at::Tensor& arrivals = all.of_streams[{device.index(), stream}];
  if (!arrivals.defined() || arrivals.numel() < count) {
    clear_reserve(all.reserves[device.index()], device);
    arrivals =
        at::zeros({std::max(count, kLeast)}, at::TensorOptions().device(device).dtype(at::kInt));
  }
  return arrivals;
}

void forget_arrivals(const c10::Device& device, kernels::Stream stream) {
  AllArrivals& all = all_arrivals();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.of_streams.erase({device.index(), stream});
  all.of_captures.erase({device.index(), stream});
}

}  // namespace torchfuse::ops
