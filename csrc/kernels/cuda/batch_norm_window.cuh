// SPDX-License-Identifier: BSD-3-Clause
// A window of batch normalization: 16 bytes that a thread reads or writes. See Note [Windows].
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/cuda/batch_norm_grid.h"
#include "kernels/cuda/vec.cuh"

namespace torchfuse::kernels::cuda {

/// Layout tags in kernel names: channels first and channels last.
struct Planes {};
struct Rows {};

template <class S>
using ComputeTypeOf = decltype(widen(S{}));
template <class S>
constexpr int kWindow = static_cast<int>(kVectorBytes / sizeof(S));
template <class S>
using RawWindow = RawVec<S, kWindow<S>>;

/// Channels per window, and in the widest tile of a sum pass.
template <class S, class Layout>
constexpr int kWindowChannels = std::is_same_v<Layout, Rows> ? kWindow<S> : 1;
constexpr std::uint32_t kSumTileChannels = 32;
constexpr std::uint32_t kWarp = static_cast<std::uint32_t>(kWarpLanes);

/// Elements [lo, hi) of a window; empty if lo == hi == 0. The window begins `first` elements (may
/// be negative) after the start of a plane in sample `row`, or of row `row` (channels last).
struct Window {
  std::int64_t row;
  std::int64_t first;
  int lo;
  int hi;
};

/// A tensor, addressed relative to the calling thread's channel. `base` is always a pointer,
/// because the compiler must see that it leads to global memory. `kWhole`: see Note [Windows].
template <class S, bool kWhole>
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

/// Sets the element at `index`, a compile-time constant. `element` is passed by value because nvcc
/// would read a reference into global memory byte by byte.
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

/// Returns the window's elements, with zeros outside [lo, hi).
template <class S, bool kWhole>
__device__ __forceinline__ RawWindow<S> load_window(const ChannelOperand<S, kWhole>& operand,
                                                    const Window& window) {
  RawWindow<S> raw = {};
  unsigned char* const address = operand.at(window);
  if constexpr (kWhole) {
    if (window.hi != 0) load_words<kVectorBytes, Keep::kNormal>(address, raw.words);
  } else if (is_full<S>(window)) {
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

template <class S, bool kWhole>
__device__ __forceinline__ void store_window(const ChannelOperand<S, kWhole>& operand,
                                             const Window& window, const RawWindow<S>& raw) {
  unsigned char* const address = operand.at(window);
  if constexpr (kWhole) {
    if (window.hi != 0) store_words<kVectorBytes, Keep::kNormal>(address, raw.words);
  } else if (is_full<S>(window)) {
    store_vec<Keep::kNormal>(address, raw, legal_width(reinterpret_cast<std::uintptr_t>(address)));
  } else {
#pragma unroll
    for (int e = 0; e < kWindow<S>; ++e) {
      if (e < window.lo || e >= window.hi) continue;
      reinterpret_cast<S*>(address)[e] = get_element<S>(raw, e);
    }
  }
}

}  // namespace torchfuse::kernels::cuda
