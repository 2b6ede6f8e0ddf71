// SPDX-License-Identifier: BSD-3-Clause
// Traverses rows with teams of threads: a warp if the row fits in its registers, otherwise a block.
//
// Note [Rows in registers]
// Each vector is at least 16 bytes of every operand, and consecutive threads read consecutive
// vectors. A thread keeps its first kKept vectors in registers, so rows of up to kKept * threads *
// kVec elements are read from memory once. Longer rows are read again, mostly from the caches. A
// row's last vector may be incomplete and is then read element by element. Rows may begin at any
// address: the row's own address determines the access width.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

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

/// Contiguous elements of storage type S: a row, or the weights of a row's columns.
template <class S, int kVec>
struct RowOperand {
  unsigned char* address;
  std::uint32_t columns;
  std::uint32_t width;  ///< bytes per access

  __device__ __forceinline__ RowOperand(const void* data, std::int64_t first, std::uint32_t count)
      : address(static_cast<unsigned char*>(const_cast<void*>(data)) +
                first * static_cast<std::int64_t>(sizeof(S))),
        columns(count),
        width(legal_width(reinterpret_cast<std::uintptr_t>(address))) {}

  __device__ __forceinline__ bool is_whole(std::uint32_t vector) const {
    return (vector + 1) * kVec <= columns;
  }

  /// Loads a vector, with zeros beyond the row's end.
  __device__ __forceinline__ RawVec<S, kVec> load(std::uint32_t vector) const {
    RawVec<S, kVec> raw = {};
    if (is_whole(vector)) {
      load_vec<Keep::kNormal>(raw, address + std::size_t{vector} * (kVec * sizeof(S)), width);
      return raw;
    }
    S elements[kVec];
    memset(elements, 0, sizeof elements);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const std::uint32_t column = vector * kVec + static_cast<std::uint32_t>(i);
      if (column < columns) elements[i] = reinterpret_cast<const S*>(address)[column];
    }
    memcpy(raw.words, elements, sizeof elements);
    return raw;
  }

  __device__ __forceinline__ void store(std::uint32_t vector, const RawVec<S, kVec>& raw) const {
    if (is_whole(vector)) {
      store_vec<Keep::kNormal>(address + std::size_t{vector} * (kVec * sizeof(S)), raw, width);
      return;
    }
    S elements[kVec];
    memcpy(elements, raw.words, sizeof elements);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const std::uint32_t column = vector * kVec + static_cast<std::uint32_t>(i);
      if (column < columns) reinterpret_cast<S*>(address)[column] = elements[i];
    }
  }
};

/// The calling thread's vectors of a row. The first kKept vectors are in registers.
template <class S, int kVec, int kKept, std::uint32_t kThreads>
struct RowVectors {
  RowOperand<S, kVec> operand;
  std::uint32_t lane;
  RawVec<S, kVec> kept[kKept];

  __device__ __forceinline__ RowVectors(const void* data, std::int64_t first, std::uint32_t columns,
                                        std::uint32_t thread)
      : operand(data, first, columns), lane(thread) {
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      const std::uint32_t vector = lane + static_cast<std::uint32_t>(k) * kThreads;
      if (vector * kVec < columns) kept[k] = operand.load(vector);
    }
  }

  /// Calls body(vector, elements) for each vector.
  template <class Body>
  __device__ __forceinline__ void for_each(const Body& body) const {
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      const std::uint32_t vector = lane + static_cast<std::uint32_t>(k) * kThreads;
      if (vector * kVec < operand.columns) body(vector, kept[k]);
    }
    for (std::uint32_t vector = lane + kKept * kThreads; vector * kVec < operand.columns;
         vector += kThreads) {
      body(vector, operand.load(vector));
    }
  }
};

/// Calls body(vector, a's elements, b's elements) for two rows with equally many columns.
template <class A, class B, int kVec, int kKept, std::uint32_t kThreads, class Body>
__device__ __forceinline__ void for_each_of_two(const RowVectors<A, kVec, kKept, kThreads>& a,
                                                const RowVectors<B, kVec, kKept, kThreads>& b,
                                                const Body& body) {
#pragma unroll
  for (int k = 0; k < kKept; ++k) {
    const std::uint32_t vector = a.lane + static_cast<std::uint32_t>(k) * kThreads;
    if (vector * kVec < a.operand.columns) body(vector, a.kept[k], b.kept[k]);
  }
  for (std::uint32_t vector = a.lane + kKept * kThreads; vector * kVec < a.operand.columns;
       vector += kThreads) {
    body(vector, a.operand.load(vector), b.operand.load(vector));
  }
}

/// A thread's share of a row's sums. After every kTogether vectors, compute-type sums move to fp64.
/// A warp's rows are too short to reach kTogether.
template <class T, int kCount, std::uint32_t kThreads>
struct RowSums {
  static constexpr std::uint32_t kTogether = 16;
  static constexpr bool kMayFlush = kThreads > kRowWarpThreads;
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
template <class S, class T, int kVec>
__device__ __forceinline__ void load_columns(const ChannelInput& input, std::uint32_t columns,
                                             std::uint32_t vector, T otherwise, T (&values)[kVec]) {
  if (input.data == nullptr) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) values[i] = otherwise;
  } else if (sizeof(S) == sizeof(T) || input.dtype == DType::kFloat32) {
    const RowOperand<T, kVec> operand(input.data, 0, columns);
    const RawVec<T, kVec> raw = operand.load(vector);
    memcpy(values, raw.words, sizeof values);
  } else {
    const RowOperand<S, kVec> operand(input.data, 0, columns);
    const RawVec<S, kVec> raw = operand.load(vector);
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

/// Launches the kernel for a warp per row if a row has at most `kKept` vectors per thread,
/// otherwise the kernel for a block per row. `kResident`: blocks per multiprocessor.
template <class S, int kKept, int kResident, class Args, class Parameter>
Status launch_rows(void (*of_warp)(Parameter), void (*of_block)(Parameter), const Args& args,
                   std::int64_t columns, int multiprocessors, Stream stream, const char* what) {
  constexpr std::int64_t kWarpColumns = kRowWarpThreads * kRowVec<S> * kKept;
  const bool warp = columns <= kWarpColumns;
  const std::uint32_t teams =
      warp ? RowTeam<kRowWarpThreads>::kTeams : RowTeam<kRowThreads>::kTeams;
  return launch(warp ? of_warp : of_block, args,
                row_blocks(args.shape.rows, teams, multiprocessors, kResident), kRowThreads, stream,
                what);
}

}  // namespace torchfuse::kernels::cuda
