// SPDX-License-Identifier: BSD-3-Clause
// Rows of results that go past the caches.
#pragma once

#include <cstdint>

#include "kernels/cpu/elements.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

// Note [Streaming stores]
// A store first brings its line into the cache. Where a tensor is larger than the caches that is a
// read of all of it for nothing, and what lies in the caches has to leave; streaming stores do
// neither. They need whole lines, since a line that ordinary stores finish is written twice, and a
// fence before others read. Rows that are written to memory which was not used just before gain by
// it, with their next reader counted: 1.1 to 1.9 times; planes of whole lines 1.05 to 1.5 times on
// an AMD EPYC.
constexpr std::int64_t kLineBytes = 64;
/// Bytes: a second-level cache, of which the reads of the same pass take their share.
constexpr std::int64_t kWorthStreaming = std::int64_t{2} << 20;

/// Whether `count` elements are whole lines.
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

/// `streamed` is the same for all rows.
template <DType kDType>
TORCHFUSE_INLINE void store_in_row(ElementOf<kDType>* p, VectorOf<kDType> x, bool streamed) {
  if (streamed) return stream_vector<kDType>(p, x);
  store_vector<kDType>(p, x);
}

/// After the last stream_vector().
TORCHFUSE_INLINE void finish_streaming() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
