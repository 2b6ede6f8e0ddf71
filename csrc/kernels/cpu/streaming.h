// SPDX-License-Identifier: BSD-3-Clause
// Writes rows of results past the caches.
#pragma once

#include <cstdint>

#include "kernels/cpu/elements.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

// Note [Streaming stores]
// A store first loads its line into the cache. If a tensor is larger than the caches, all of it is
// read for nothing, and other data is evicted. Streaming stores avoid both costs. They need full
// lines, because a line that ordinary stores complete is written twice, and a fence before other
// threads read the data. Streaming rows to memory that was not used just before is 1.1 to 1.9 times
// as fast, including the next reader. Planes of full lines are 1.05 to 1.5 times as fast (AMD
// EPYC).
constexpr std::int64_t kLineBytes = 64;
/// Minimum size in bytes: a second-level cache, minus a share for the pass's reads.
constexpr std::int64_t kWorthStreaming = std::int64_t{2} << 20;

/// Returns whether `count` elements are full cache lines.
template <DType kDType>
TORCHFUSE_INLINE bool are_lines(const void* data, std::int64_t count) {
  const std::int64_t bytes = count * static_cast<std::int64_t>(sizeof(ElementOf<kDType>));
  return bytes % kLineBytes == 0 && reinterpret_cast<std::uintptr_t>(data) % kLineBytes == 0;
}

template <DType kDType>
TORCHFUSE_INLINE bool is_worth_streaming(const void* data, std::int64_t rows,
                                         std::int64_t columns) {
#if defined(__AVX2__)
  const auto row_bytes = columns * static_cast<std::int64_t>(sizeof(ElementOf<kDType>));
  return rows * row_bytes >= kWorthStreaming && are_lines<kDType>(data, columns);
#else
  static_cast<void>(data), static_cast<void>(rows), static_cast<void>(columns);
  return false;
#endif
}

template <DType kDType>
TORCHFUSE_INLINE void stream_vector(ElementOf<kDType>* p, VectorOf<kDType> x) {
  const auto store_to = [&](auto* bits) __attribute__((always_inline)) {
    store_vector<kDType>(reinterpret_cast<ElementOf<kDType>*>(bits), x);
  };
#if defined(__AVX512F__)
  if constexpr (sizeof(ElementOf<kDType>) > 2) {
    __m512i bits;
    store_to(&bits);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), bits);
  } else {
    __m256i bits;
    store_to(&bits);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), bits);
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(ElementOf<kDType>) > 2) {
    __m256i bits;
    store_to(&bits);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), bits);
  } else {
    __m128i bits;
    store_to(&bits);
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), bits);
  }
#else
  store_to(p);
#endif
}

/// Stores a vector. `streamed` is the same for all rows.
template <DType kDType>
TORCHFUSE_INLINE void store_in_row(ElementOf<kDType>* p, VectorOf<kDType> x, bool streamed) {
  if (streamed) return stream_vector<kDType>(p, x);
  store_vector<kDType>(p, x);
}

/// Call after the last stream_vector().
TORCHFUSE_INLINE void finish_streaming() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
