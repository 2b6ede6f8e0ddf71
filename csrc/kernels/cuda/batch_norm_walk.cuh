// SPDX-License-Identifier: BSD-3-Clause
// Assigns windows to batch normalization's threads and launches kernels. See Note [Windows].
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/batch_norm_window.cuh"
#include "kernels/cuda/launch.cuh"

namespace torchfuse::kernels::cuda {

/// The calling thread's position in the grid.
template <class S, class Layout>
struct GridPlace {
  static constexpr int kChannels = kWindowChannels<S, Layout>;

  std::int64_t tile;
  std::int64_t slice;
  std::uint32_t lane;
  std::uint32_t column;
  std::uint32_t rank;    ///< index among the block's rows
  std::int64_t channel;  ///< the first of kChannels

  __device__ __forceinline__ explicit GridPlace(const BatchNormGrid& grid)
      : tile(blockIdx.x % static_cast<std::uint32_t>(grid.tiles)),
        slice(blockIdx.x / static_cast<std::uint32_t>(grid.tiles)),
        lane(threadIdx.x % grid.lanes),
        column(threadIdx.x / grid.lanes % grid.columns),
        rank(threadIdx.x / (grid.lanes * grid.columns)),
        channel((tile * grid.columns + column) * kChannels) {}

  /// Returns the channel at which Window::first is 0. Channels last, always returns channel 0.
  __device__ __forceinline__ std::int64_t base_channel() const {
    return std::is_same_v<Layout, Rows> ? 0 : channel;
  }

  /// Units [begin, end) belong to the thread's slice.
  __device__ __forceinline__ std::int64_t begin(const BatchNormGrid& grid) const {
    return slice * grid.slice_units;
  }
  __device__ __forceinline__ std::int64_t end(const BatchNormGrid& grid) const {
    const std::int64_t end = begin(grid) + grid.slice_units;
    return end < grid.units ? end : grid.units;
  }
};

/// Iterates over the calling thread's windows.
template <class S, class Layout, bool kWhole>
struct WindowCursor;

template <class S, bool kWhole>
struct WindowCursor<S, Planes, kWhole> : GridPlace<S, Planes> {
  __device__ __forceinline__ explicit WindowCursor(const BatchNormGrid& grid)
      : GridPlace<S, Planes>(grid), grid_(grid), end_(this->end(grid)) {
    if (this->channel >= grid.channels) end_ = 0;
    unit_ = this->begin(grid) + this->rank;
    row_ = unit_;
    if (grid.segments > 1) {
      row_ = unit_ / grid.segments;
      segment_ = static_cast<std::uint32_t>(unit_ - row_ * grid.segments);
    }
    phase_ = grid.phase + static_cast<std::uint32_t>(this->channel) * grid.channel_step;
  }

  __device__ __forceinline__ bool done() const { return unit_ >= end_; }

  __device__ __forceinline__ Window next() {
    Window window{row_, 0, 0, 0};
    if (!done()) bound(window);
    unit_ += grid_.rows;
    row_ += grid_.row_step;
    segment_ += grid_.segment_step;
    if (segment_ >= grid_.segments) {
      segment_ -= grid_.segments;
      ++row_;
    }
    return window;
  }

 private:
  __device__ __forceinline__ void bound(Window& window) const {
    constexpr int kVec = kWindow<S>;
    window.first = (static_cast<std::int64_t>(segment_) * grid_.lanes + this->lane) * kVec;
    if constexpr (kWhole) {
      if (window.first < grid_.inner) window.hi = kVec;
      return;
    }
    window.first -= (phase_ + static_cast<std::uint32_t>(row_) * grid_.outer_step) % kVec;
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
};

/// A unit is a row. All threads of a block finish in the same round: threads with fewer windows or
/// without a channel get empty windows.
template <class S, bool kWhole>
struct WindowCursor<S, Rows, kWhole> : GridPlace<S, Rows> {
  __device__ __forceinline__ explicit WindowCursor(const BatchNormGrid& grid)
      : GridPlace<S, Rows>(grid),
        rows_(grid.rows),
        first_row_(this->begin(grid)),
        end_(this->end(grid)) {
    const std::int64_t rest = grid.channels - this->channel;
    channels_here_ = rest < this->kChannels ? (rest > 0 ? static_cast<int>(rest) : 0)
                                            : static_cast<int>(this->kChannels);
  }

  __device__ __forceinline__ bool done() const { return first_row_ >= end_; }

  __device__ __forceinline__ Window next() {
    Window window{first_row_ + this->rank, this->channel, 0, 0};
    if (window.row < end_) window.hi = channels_here_;
    first_row_ += rows_;
    return window;
  }

 private:
  std::uint32_t rows_;
  std::int64_t first_row_;  ///< first row of the block's next round
  std::int64_t end_;
  int channels_here_;
};

/// Calls use(windows, loaded) for the calling thread's windows, kLoads at a time. kLoads calls of
/// load(window) are in flight together: as many as registers allow, fewer in fp64.
template <int kLoads, class Cursor, class Load, class Use>
__device__ __forceinline__ void for_each_round(Cursor& cursor, const Load& load, const Use& use) {
#pragma unroll 1
  while (!cursor.done()) {
    Window windows[kLoads];
    decltype(load(Window{})) loaded[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      windows[k] = cursor.next();
      loaded[k] = load(windows[k]);
    }
    use(windows, loaded);
  }
}

/// Like for_each_round(), but calls use(window, loaded) window by window.
template <int kLoads, class Cursor, class Load, class Use>
__device__ __forceinline__ void for_each_window(Cursor& cursor, const Load& load, const Use& use) {
  for_each_round<kLoads>(cursor, load, [&](const auto& windows, auto& loaded) {
#pragma unroll
    for (int k = 0; k < kLoads; ++k) use(windows[k], loaded[k]);
  });
}

/// Resident blocks per multiprocessor for which registers are budgeted. Only the forward pass's
/// output kernel uses kElementBlocks.
template <class Layout>
constexpr int kSumBlocks = std::is_same_v<Layout, Rows> ? 4 : 3;
constexpr int kElementBlocks = 4;

/// Calls run(element, layout, whole) for the dtype and layout of `shape` and for all tensors that a
/// pass reads or writes.
template <class Run>
Status dispatch_batch_norm(const BatchNormShape& shape,
                           std::initializer_list<BatchNormInput> tensors, const char* what,
                           const Run& run) {
  return dispatch_dtype(shape.dtype, what, [&](auto element) {
    const auto run_layout = [&](auto whole) {
      return shape.channels_last ? run(element, Rows{}, whole) : run(element, Planes{}, whole);
    };
    return windows_are_whole(shape, tensors) ? run_layout(std::true_type{})
                                             : run_layout(std::false_type{});
  });
}

/// Launches `kernel` on the grid in `arguments`.
template <class Parameter, class Arguments>
Status launch_batch_norm(void (*kernel)(Parameter), const Arguments& arguments, Stream operand,
                         const char* what) {
  constexpr std::int64_t kMaxBlocks = 0x7fffffff;
  const std::int64_t blocks = arguments.grid.blocks();
  if (blocks > kMaxBlocks) return Status{cudaErrorInvalidConfiguration, what};
  return launch(kernel, arguments, static_cast<std::uint32_t>(blocks), kGridThreads, operand, what);
}

}  // namespace torchfuse::kernels::cuda
