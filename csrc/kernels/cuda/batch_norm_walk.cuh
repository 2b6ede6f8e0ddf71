// SPDX-License-Identifier: BSD-3-Clause
// What a thread of batch normalization reads and writes. See Note [Windows].
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/cuda/batch_norm_grid.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vec.cuh"

namespace torchfuse::kernels::cuda {

/// Channels first and last, as names of kernels have them.
struct Planes {};
struct Rows {};

template <class S>
using ComputeTypeOf = decltype(widen(S{}));
template <class S>
constexpr int kWindow = static_cast<int>(kVectorBytes / sizeof(S));
template <class S>
using RawWindow = RawVec<S, kWindow<S>>;

/// Channels in a window, and in the widest tile of a pass of sums.
template <class S, class Layout>
constexpr int kWindowChannels = std::is_same_v<Layout, Rows> ? kWindow<S> : 1;
constexpr std::uint32_t kSumTileChannels = 32;
constexpr std::uint32_t kWarp = static_cast<std::uint32_t>(kWarpLanes);

/// Elements [lo, hi) of the window that begins `first` elements behind the start of a plane or of a
/// channel, in sample or row `row`. `first` may be negative. lo == hi == 0: nothing.
struct Window {
  std::int64_t row;
  std::int64_t first;
  int lo;
  int hi;
};

/// Where the calling thread stands in the grid, and the windows it handles, one after the other.
template <class S, class Layout>
struct WindowCursor {
  static constexpr int kChannels = kWindowChannels<S, Layout>;

  std::int64_t tile;
  std::int64_t slice;
  std::uint32_t lane;
  std::uint32_t column;
  std::uint32_t rank;    ///< among the rows
  std::int64_t channel;  ///< the first of kChannels

  __device__ __forceinline__ explicit WindowCursor(const BatchNormGrid& grid)
      : tile(blockIdx.x % static_cast<std::uint32_t>(grid.tiles)),
        slice(blockIdx.x / static_cast<std::uint32_t>(grid.tiles)),
        lane(threadIdx.x % grid.lanes),
        column(threadIdx.x / grid.lanes % grid.columns),
        rank(threadIdx.x / (grid.lanes * grid.columns)),
        channel((tile * grid.columns + column) * kChannels),
        grid_(grid) {
    const std::int64_t begin = slice * grid.slice_units;
    end_ = begin + grid.slice_units < grid.units ? begin + grid.slice_units : grid.units;
    if (channel >= grid.channels) end_ = 0;
    unit_ = begin + rank;
    row_ = unit_;
    if (grid.segments > 1) {
      row_ = unit_ / grid.segments;
      segment_ = static_cast<std::uint32_t>(unit_ - row_ * grid.segments);
    }
    const std::int64_t rest = grid.channels - channel;
    channels_here_ = rest < kChannels ? static_cast<int>(rest) : kChannels;
    phase_ = grid.phase + static_cast<std::uint32_t>(channel) * grid.channel_step;
  }

  __device__ __forceinline__ bool done() const { return unit_ >= end_; }

  __device__ __forceinline__ Window next() {
    Window window{row_, 0, 0, 0};
    if (!done()) {
      if constexpr (std::is_same_v<Layout, Rows>) {
        window.hi = channels_here_;
      } else {
        bound(window);
      }
    }
    unit_ += grid_.rows;
    row_ += grid_.segments > 1 ? grid_.rows / grid_.segments : grid_.rows;
    if (grid_.segments > 1) {
      segment_ += grid_.rows % grid_.segments;
      if (segment_ >= grid_.segments) {
        segment_ -= grid_.segments;
        ++row_;
      }
    }
    return window;
  }

 private:
  __device__ __forceinline__ void bound(Window& window) const {
    constexpr int kVec = kWindow<S>;
    const std::uint32_t past =
        (phase_ + static_cast<std::uint32_t>(row_) * grid_.outer_step) % kVec;
    window.first = (static_cast<std::int64_t>(segment_) * grid_.lanes + lane) * kVec - past;
    const std::int64_t rest = grid_.inner - window.first;
    if (rest <= 0) return;
    window.lo = window.first < 0 ? static_cast<int>(-window.first) : 0;
    window.hi = rest < kVec ? static_cast<int>(rest) : kVec;
  }

  const BatchNormGrid& grid_;
  std::int64_t unit_;
  std::int64_t end_;
  std::int64_t row_;
  std::uint32_t segment_ = 0;
  std::uint32_t phase_;
  int channels_here_;
};

/// A tensor as seen from the calling thread's channels. A pointer throughout: the compiler must see
/// that it leads to global memory.
template <class S>
struct ChannelOperand {
  unsigned char* base;
  std::int64_t outer_stride;

  __device__ __forceinline__ ChannelOperand(const BatchNormInput& tensor, std::int64_t channel)
      : base(static_cast<unsigned char*>(const_cast<void*>(tensor.data))),
        outer_stride(tensor.outer_stride) {
    if (base != nullptr) base += channel * tensor.channel_stride * kElementBytes;
  }

  __device__ __forceinline__ unsigned char* at(const Window& window) const {
    return base + (window.row * outer_stride + window.first) * kElementBytes;
  }

 private:
  static constexpr auto kElementBytes = static_cast<std::int64_t>(sizeof(S));
};

template <class S>
__device__ __forceinline__ bool is_full(const Window& window) {
  return window.hi - window.lo == kWindow<S>;
}

/// Makes `element` the one at `index`, which is known at compile time. By value: behind a reference
/// into global memory nvcc would read it byte by byte.
template <class S>
__device__ __forceinline__ void set_element(RawWindow<S>& raw, int index, S element) {
  if constexpr (sizeof(S) == 2) {
    const int shift = index % 2 * 16;
    raw.words[index / 2] = (raw.words[index / 2] & ~(0xffffu << shift)) |
                           (static_cast<std::uint32_t>(element.bits) << shift);
  } else {
    memcpy(&raw.words[index * static_cast<int>(sizeof(S) / 4)], &element, sizeof element);
  }
}

template <class S>
__device__ __forceinline__ S get_element(const RawWindow<S>& raw, int index) {
  if constexpr (sizeof(S) == 2) {
    return S{static_cast<std::uint16_t>(raw.words[index / 2] >> (index % 2 * 16))};
  } else {
    S element;
    memcpy(&element, &raw.words[index * static_cast<int>(sizeof(S) / 4)], sizeof element);
    return element;
  }
}

/// The window's elements; zeros outside [lo, hi).
template <class S>
__device__ __forceinline__ RawWindow<S> load_window(const ChannelOperand<S>& operand,
                                                    const Window& window) {
  RawWindow<S> raw = {};
  unsigned char* const address = operand.at(window);
  if (is_full<S>(window)) {
    load_vec<Keep::kNormal>(raw, address, legal_width(reinterpret_cast<std::uintptr_t>(address)));
  } else {
#pragma unroll
    for (int e = 0; e < kWindow<S>; ++e) {
      if (e < window.lo || e >= window.hi) continue;
      set_element<S>(raw, e, reinterpret_cast<const S*>(address)[e]);
    }
  }
  return raw;
}

template <class S>
__device__ __forceinline__ void store_window(const ChannelOperand<S>& operand, const Window& window,
                                             const RawWindow<S>& raw) {
  unsigned char* const address = operand.at(window);
  if (is_full<S>(window)) {
    store_vec<Keep::kNormal>(address, raw, legal_width(reinterpret_cast<std::uintptr_t>(address)));
  } else {
#pragma unroll
    for (int e = 0; e < kWindow<S>; ++e) {
      if (e < window.lo || e >= window.hi) continue;
      reinterpret_cast<S*>(address)[e] = get_element<S>(raw, e);
    }
  }
}

/// use(window, load(window)) for all windows of the calling thread, kLoads of them in flight: as
/// many as registers allow, which are fewer in fp64.
template <int kLoads, class Cursor, class Load, class Use>
__device__ __forceinline__ void for_each_window(Cursor& cursor, const Load& load, const Use& use) {
#pragma unroll 1
  while (!cursor.done()) {
    Window windows[kLoads];
    decltype(load(Window{})) loaded[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      windows[k] = cursor.next();
      loaded[k] = load(windows[k]);
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) use(windows[k], loaded[k]);
  }
}

/// Resident blocks per multiprocessor that registers are budgeted for: rows keep terms and sums of
/// all channels of a window.
template <class Layout>
constexpr int kResidentBlocks = std::is_same_v<Layout, Rows> ? 2 : 3;

/// Runs run(element, layout) for the dtype and layout of `shape`.
template <class Run>
Status dispatch_batch_norm(const BatchNormShape& shape, const char* what, const Run& run) {
  const auto with_layout = [&](auto element) {
    return shape.channels_last ? run(element, Rows{}) : run(element, Planes{});
  };
  switch (shape.dtype) {
    case DType::kFloat32:
      return with_layout(float{});
    case DType::kFloat16:
      return with_layout(Half{});
    case DType::kBFloat16:
      return with_layout(BFloat16{});
    case DType::kFloat64:
      return with_layout(double{});
  }
  return Status{cudaErrorInvalidValue, what};
}

/// Starts `kernel` on the grid of its arguments.
template <class Parameter, class Arguments>
Status launch_batch_norm(void (*kernel)(Parameter), const Arguments& arguments, Stream operand,
                         const char* what) {
  constexpr std::int64_t kMaxBlocks = 0x7fffffff;
  const std::int64_t blocks = arguments.grid.blocks();
  if (blocks > kMaxBlocks) return Status{cudaErrorInvalidConfiguration, what};
  return launch(kernel, arguments, static_cast<std::uint32_t>(blocks), kGridThreads, operand, what);
}

}  // namespace torchfuse::kernels::cuda
