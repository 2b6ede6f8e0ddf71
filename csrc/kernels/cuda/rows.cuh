// SPDX-License-Identifier: BSD-3-Clause
// Traverses rows with teams of threads: a warp if the row fits in its registers, otherwise a block.
//
// Note [Rows in registers]
// Each vector is at least 16 bytes of every operand, and consecutive threads read consecutive
// vectors. Rows of up to kKept * threads * kVec elements are read once and kept in registers, kKept
// vectors per thread. Longer rows are read in every pass, mostly from the caches, kKept vectors at
// a time. If all rows are aligned and consist of whole vectors, the host chooses
// an instance with 16-byte accesses. The other instance accesses single elements, so rows may begin
// at any address and the last vector may be incomplete.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <utility>

#include "kernels/common/channel_vector.h"
#include "kernels/common/shared.h"
#include "kernels/common/status.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vec.cuh"

namespace torchfuse::kernels::cuda {

constexpr std::uint32_t kRowThreads = 256;
constexpr std::uint32_t kRowWarpThreads = 32;
constexpr std::uint32_t kRowWarps = kRowThreads / kRowWarpThreads;

/// Compute type: fp64 for fp64, otherwise fp32.
template <class S>
using RowCompute = decltype(widen(S{}));

/// Elements per vector: 16 bytes of S, the narrower type in which a row is read or written.
template <class S>
constexpr int kRowVec = 16 / static_cast<int>(sizeof(S));

/// Threads that handle a row together.
template <std::uint32_t kThreads>
struct RowTeam {
  static constexpr std::uint32_t kTeams = kRowThreads / kThreads;  ///< per block
  std::uint32_t lane = threadIdx.x % kThreads;
  std::uint32_t parity = 0;

  __device__ __forceinline__ std::int64_t first_row() const {
    return static_cast<std::int64_t>(blockIdx.x) * kTeams + threadIdx.x / kThreads;
  }
  __device__ __forceinline__ static std::int64_t row_step() {
    return static_cast<std::int64_t>(gridDim.x) * kTeams;
  }

  /// Gives every thread the team's sums. The order depends only on thread numbers.
  template <class T, int kCount>
  __device__ __forceinline__ void sum(T (&values)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int distance = kRowWarpThreads / 2; distance > 0; distance /= 2) {
        values[i] = values[i] + __shfl_xor_sync(0xffffffffu, values[i], distance);
      }
    }
    if constexpr (kThreads > kRowWarpThreads) {
      across_warps(values, [](T a, T b) { return a + b; });
    }
  }

  /// Returns the team's largest number, or NaN if any number is NaN.
  template <class T>
  __device__ __forceinline__ T largest(T value) {
#pragma unroll
    for (int distance = kRowWarpThreads / 2; distance > 0; distance /= 2) {
      value = kernels::max(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    if constexpr (kThreads > kRowWarpThreads) {
      T values[1] = {value};
      across_warps(values, [](T a, T b) { return kernels::max(a, b); });
      value = values[0];
    }
    return value;
  }

 private:
  template <class T, int kCount>
  struct Shared {
    T values[2][kRowWarps][kCount];
  };

  /// Alternates between two buffers: the next call's barrier follows all reads of the buffer.
  template <class T, int kCount, class Combine>
  __device__ __forceinline__ void across_warps(T (&values)[kCount], const Combine& combine) {
    auto& buffer = block_shared<Shared<T, kCount>>().values[parity];
    parity ^= 1u;
    if (threadIdx.x % kRowWarpThreads == 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) buffer[threadIdx.x / kRowWarpThreads][i] = values[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      values[i] = buffer[0][i];
#pragma unroll
      for (std::uint32_t warp = 1; warp < kRowWarps; ++warp) {
        values[i] = combine(values[i], buffer[warp][i]);
      }
    }
  }
};

/// Returns whether all rows are aligned and consist of whole vectors. Null pointers are aligned.
template <class S>
bool rows_are_aligned(std::int64_t columns, std::initializer_list<const void*> operands) {
  std::uintptr_t addresses = 0;
  for (const void* operand : operands) addresses |= reinterpret_cast<std::uintptr_t>(operand);
  return columns % kRowVec<S> == 0 && legal_width(addresses) == kVectorBytes;
}

/// Contiguous elements of storage type S: a row, or the weights of a row's columns. `kAligned`: see
/// Note [Rows in registers].
template <class S, int kVec, bool kAligned>
struct RowOperand {
  unsigned char* address;
  std::uint32_t columns;

  __device__ __forceinline__ RowOperand(const void* data, std::int64_t first, std::uint32_t count)
      : address(static_cast<unsigned char*>(const_cast<void*>(data)) +
                first * static_cast<std::int64_t>(sizeof(S))),
        columns(count) {}

  __device__ __forceinline__ unsigned char* address_of(std::uint32_t vector) const {
    return address + std::size_t{vector} * (kVec * sizeof(S));
  }
  /// Returns whether a column is in the row.
  __device__ __forceinline__ bool has(std::uint32_t vector, int i) const {
    return kAligned || vector * kVec + static_cast<std::uint32_t>(i) < columns;
  }

  /// Loads a vector, with zeros beyond the row's end.
  __device__ __forceinline__ RawVec<S, kVec> load(std::uint32_t vector) const {
    RawVec<S, kVec> raw;
    if constexpr (kAligned) {
      load_words<kVectorBytes, Keep::kNormal>(address_of(vector), raw.words);
    } else {
      S elements[kVec] = {};
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (has(vector, i)) elements[i] = reinterpret_cast<const S*>(address_of(vector))[i];
      }
      memcpy(raw.words, elements, sizeof elements);
    }
    return raw;
  }

  __device__ __forceinline__ void store(std::uint32_t vector, const RawVec<S, kVec>& raw) const {
    if constexpr (kAligned) {
      store_words<kVectorBytes, Keep::kNormal>(address_of(vector), raw.words);
    } else {
      S elements[kVec];
      memcpy(elements, raw.words, sizeof elements);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (has(vector, i)) reinterpret_cast<S*>(address_of(vector))[i] = elements[i];
      }
    }
  }
};

/// Returns a vector of storage type S.
template <class S, class T, int kVec>
__device__ __forceinline__ RawVec<S, kVec> to_raw(const T (&values)[kVec]) {
  RawVec<S, kVec> raw;
#pragma unroll
  for (int pair = 0; pair < kVec / 2; ++pair) {
    const T two[2] = {values[2 * pair], values[2 * pair + 1]};
    set_pair(raw, pair, two);
  }
  return raw;
}

template <class T>
struct RowStatistics {
  T mean;
  T rstd;
};

/// The calling thread's vectors of rows that `source` loads. With `kFits`, all are in registers.
template <class Source, int kVec, int kKept, std::uint32_t kThreads, bool kFits>
struct RowVectors {
  using Loaded = decltype(std::declval<Source>().load(0u));
  static constexpr bool kInRegisters = kFits;
  Source source;
  std::uint32_t columns;
  std::uint32_t lane;
  Loaded kept[kFits ? kKept : 1];

  __device__ __forceinline__ RowVectors(const Source& rows, std::uint32_t count,
                                        std::uint32_t thread)
      : source(rows), columns(count), lane(thread) {
    if constexpr (kFits) load(lane, kept);
  }

  /// Calls body(k, vector, elements) for each vector: vector k of kKept at a time.
  template <class Body>
  __device__ __forceinline__ void for_each(const Body& body) const {
    if constexpr (kFits) {
      visit(lane, kept, body);
    } else {
      for (std::uint32_t first = lane; first * kVec < columns; first += kKept * kThreads) {
        Loaded loaded[kKept];
        load(first, loaded);
        visit(first, loaded, body);
      }
    }
  }

 private:
  __device__ __forceinline__ void load(std::uint32_t first, Loaded (&loaded)[kKept]) const {
#pragma unroll
    for (std::uint32_t k = 0; k < kKept; ++k) {
      const std::uint32_t vector = first + k * kThreads;
      if (vector * kVec < columns) loaded[k] = source.load(vector);
    }
  }

  template <class Body>
  __device__ __forceinline__ void visit(std::uint32_t first, const Loaded (&loaded)[kKept],
                                        const Body& body) const {
#pragma unroll
    for (std::uint32_t k = 0; k < kKept; ++k) {
      const std::uint32_t vector = first + k * kThreads;
      if (vector * kVec < columns) body(k, vector, loaded[k]);
    }
  }
};

/// A thread's share of a row's sums. After every kTogether vectors, compute-type sums move to fp64.
/// Rows that fit the registers are too short to reach kTogether, as all rows of a warp are.
template <class T, int kCount, std::uint32_t kThreads, bool kFits = kThreads == kRowWarpThreads>
struct RowSums {
  static constexpr std::uint32_t kTogether = 16;
  static constexpr bool kMayFlush = !kFits;
  T recent[kCount] = {};
  double flushed[kCount] = {};

  /// Must be called after each vector.
  __device__ __forceinline__ void end_vector(std::uint32_t vector) {
    if constexpr (kMayFlush) {
      if (vector / kThreads % kTogether == kTogether - 1) flush();
    }
  }

  /// Calls body(the team's sums) in every thread, in fp64 if any thread flushed during the row.
  template <int kVec, class Body>
  __device__ __forceinline__ void over_team(RowTeam<kThreads>& team, std::uint32_t columns,
                                            const Body& body) {
    if constexpr (kMayFlush) {
      if (columns > (kTogether - 1) * kThreads * kVec) {
        flush();
        team.sum(flushed);
        return body(flushed);
      }
    }
    team.sum(recent);
    body(recent);
  }

  __device__ __forceinline__ void scale(int i, T factor) {
    recent[i] = recent[i] * factor;
    if constexpr (kMayFlush) flushed[i] *= static_cast<double>(factor);
  }

  __device__ __forceinline__ void flush() {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      flushed[i] += static_cast<double>(recent[i]);
      recent[i] = T(0);
    }
  }
};

/// Loads the weights or biases of a vector's columns, or `otherwise` if `input` is absent.
template <class S, bool kAligned, class T, int kVec>
__device__ __forceinline__ void load_columns(const ChannelInput& input, std::uint32_t columns,
                                             std::uint32_t vector, T otherwise, T (&values)[kVec]) {
  if (input.data == nullptr) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = otherwise;
  } else if (sizeof(S) == sizeof(T) || input.dtype == DType::kFloat32) {
    const auto raw = RowOperand<T, kVec, kAligned>(input.data, 0, columns).load(vector);
    memcpy(values, raw.words, sizeof values);
  } else {
    const auto raw = RowOperand<S, kVec, kAligned>(input.data, 0, columns).load(vector);
#pragma unroll
    for (int pair = 0; pair < kVec / 2; ++pair) {
      T two[2];
      get_pair(raw, pair, two);
      values[2 * pair] = two[0];
      values[2 * pair + 1] = two[1];
    }
  }
}

/// Returns `resident` blocks per multiprocessor, but no more than the rows need.
inline std::uint32_t row_blocks(std::int64_t rows, std::uint32_t teams, int multiprocessors,
                                int resident) {
  const std::int64_t wanted = (rows + teams - 1) / teams;
  const std::int64_t most = static_cast<std::int64_t>(multiprocessors) * resident;
  return static_cast<std::uint32_t>(wanted < most ? wanted : most);
}

/// Columns of which a team's threads keep everything in registers, with `kKept` vectors each.
template <class S, int kKept, std::uint32_t kThreads>
constexpr std::int64_t kFittingColumns = std::int64_t{kThreads} * kRowVec<S> * kKept;

/// Launches the kernel for a warp per row if a row has at most `kKept` vectors per thread,
/// otherwise the kernel for a block per row. `kResident`: blocks per multiprocessor.
template <class S, int kKept, int kResident, class Args, class Parameter>
Status launch_rows(void (*of_warp)(Parameter), void (*of_block)(Parameter), const Args& args,
                   std::int64_t columns, int multiprocessors, Stream stream, const char* what) {
  const bool warp = columns <= kFittingColumns<S, kKept, kRowWarpThreads>;
  const std::uint32_t teams =
      warp ? RowTeam<kRowWarpThreads>::kTeams : RowTeam<kRowThreads>::kTeams;
  return launch(warp ? of_warp : of_block, args,
                row_blocks(args.shape.rows, teams, multiprocessors, kResident), kRowThreads, stream,
                what);
}

}  // namespace torchfuse::kernels::cuda
