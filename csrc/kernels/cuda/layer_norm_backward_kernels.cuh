// SPDX-License-Identifier: BSD-3-Clause
// Kernels for layer normalization's backward pass.
//
// Note [Gradients in one pass]
// If a row fits the registers of its team, one kernel computes all gradients: dy and the source are
// read once. Each thread adds its columns' products over the team's rows, and each block writes a
// slice of partial sums. A longer row is read once more, by a kernel that sums tiles of columns.
// A last kernel adds the slices in fp64. The number of slices depends on the device.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <type_traits>

#include "kernels/cuda/layer_norm_types.cuh"
#include "kernels/layer_norm_backward.h"

namespace torchfuse::kernels::cuda {

/// Loads the weights of a vector's columns.
template <class S, bool kAligned, int kVec>
__device__ __forceinline__ void load_weights(const LayerNormBackwardArgs& args,
                                             std::uint32_t vector, RowCompute<S> (&weights)[kVec]) {
  load_columns<S, kAligned>(args.weight, static_cast<std::uint32_t>(args.shape.columns), vector,
                            RowCompute<S>(1), weights);
}

/// Computes x_hat for a vector's columns, given their weights.
template <class S, class O, bool kFromOutput, bool kAligned>
struct XHat {
  using Source = std::conditional_t<kFromOutput, O, S>;
  using T = RowCompute<S>;
  static constexpr int kVec = kRowVec<S>;
  T bias[kVec];
  T inverse[kVec];

  __device__ __forceinline__ XHat(const LayerNormBackwardArgs& args, std::uint32_t vector,
                                  const T (&weights)[kVec]) {
    if constexpr (kFromOutput) {
      const auto columns = static_cast<std::uint32_t>(args.shape.columns);
      load_columns<S, kAligned>(args.bias, columns, vector, T(0), bias);
#pragma unroll
      for (int i = 0; i < kVec; ++i) inverse[i] = inverse_weight(weights[i]);
    }
  }

  __device__ __forceinline__ T operator()(T source, int i, T mean, T rstd) const {
    if constexpr (kFromOutput) {
      return x_hat_of_output(source, bias[i], inverse[i]);
    } else {
      return x_hat_of_input(source, mean, rstd);
    }
  }
};

/// Returns a row's mean, or 0 if x_hat does not need the mean.
template <class T, bool kFromOutput>
__device__ __forceinline__ T mean_of_row(const LayerNormBackwardArgs& args, std::int64_t row) {
  return kFromOutput || args.shape.rms ? T(0) : static_cast<const T*>(args.mean)[row];
}

// --- Sums over rows ------------------------------------------------------------------------------

/// Each thread's sums, first for the weight and then for the bias.
template <class T, int kVec>
struct ColumnSumsShared {
  T sums[kRowThreads * kVec];
};

/// Adds the sums of a block's threads over the threads `lanes` apart, which have the same columns.
/// Stores the results from `column` on, `lanes` * kVec of them, in a slice of partial sums.
template <class T, int kVec>
__device__ __forceinline__ void store_column_sums(const T (&sums)[kVec], std::uint32_t lanes,
                                                  std::uint32_t column, std::uint32_t columns,
                                                  T* slice) {
  auto& shared = block_shared<ColumnSumsShared<T, kVec>>().sums;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kVec; ++j) shared[threadIdx.x * kVec + j] = sums[j];
  __syncthreads();
  const std::uint32_t tile = lanes * kVec;
#pragma unroll 1
  for (std::uint32_t i = threadIdx.x; i < tile && column + i < columns; i += kRowThreads) {
    T sum = shared[i];
#pragma unroll 1
    for (std::uint32_t other = i + tile; other < kRowThreads * kVec; other += tile) {
      sum = sum + shared[other];
    }
    slice[column + i] = sum;
  }
}

/// Returns a slice's partial sums for the weight (0) or the bias (1).
template <class T>
__device__ __forceinline__ T* partials_of(const LayerNormBackwardArgs& args, std::int64_t slice,
                                          int which) {
  return static_cast<T*>(args.partials) + (slice * 2 + which) * padded_columns(args.shape.columns);
}

// --- Gradients of rows ---------------------------------------------------------------------------

constexpr int kBackwardKept = 2;
constexpr int kBackwardBlocks = 2;  ///< resident on a multiprocessor

/// The calling thread's vectors in a row's gradient and source.
template <class S, class O, bool kFromOutput, std::uint32_t kThreads, bool kFits, bool kAligned>
struct RowGradients {
  using T = RowCompute<S>;
  using RowXHat = XHat<S, O, kFromOutput, kAligned>;
  static constexpr int kVec = kRowVec<S>;

  struct Loaded {
    RawVec<O, kVec> dy;
    RawVec<typename RowXHat::Source, kVec> source;
  };
  struct Operands {
    RowOperand<O, kVec, kAligned> dy;
    RowOperand<typename RowXHat::Source, kVec, kAligned> source;
    __device__ __forceinline__ Loaded load(std::uint32_t vector) const {
      return {dy.load(vector), source.load(vector)};
    }
  };

  T mean = T(0);
  T rstd = T(0);
  RowVectors<Operands, kVec, kBackwardKept, kThreads, kFits> vectors;

  /// Loads a row; nothing if there is no such row.
  __device__ __forceinline__ RowGradients(const LayerNormBackwardArgs& args, std::int64_t row,
                                          std::uint32_t lane)
      : vectors(operands_of(args, row), row < args.shape.rows ? columns_of(args) : 0, lane) {
    if (row >= args.shape.rows) return;
    mean = mean_of_row<T, kFromOutput>(args, row);
    rstd = static_cast<const T*>(args.rstd)[row];
  }

  /// Calls body(k, i, dy, g, x_hat) for each element of a vector, vector k of kBackwardKept at a
  /// time, then at_end(vector).
  template <class Body, class AtEnd>
  __device__ __forceinline__ void for_each(const LayerNormBackwardArgs& args, const Body& body,
                                           const AtEnd& at_end) const {
    vectors.for_each([&](std::uint32_t k, std::uint32_t vector, const Loaded& loaded) {
      T weights[kVec];
      load_weights<S, kAligned>(args, vector, weights);
      const RowXHat x_hat(args, vector, weights);
#pragma unroll
      for (int pair = 0; pair < kVec / 2; ++pair) {
        T grads[2];
        T values[2];
        get_pair(loaded.dy, pair, grads);
        get_pair(loaded.source, pair, values);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int j = 2 * pair + i;
          // Beyond the row's end, 0 times infinity would be NaN.
          const bool inside = vectors.source.dy.has(vector, j);
          body(k, j, grads[i], grads[i] * weights[j],
               inside ? x_hat(values[i], j, mean, rstd) : T(0));
        }
      }
      at_end(vector);
    });
  }

 private:
  __device__ __forceinline__ static std::uint32_t columns_of(const LayerNormBackwardArgs& args) {
    return static_cast<std::uint32_t>(args.shape.columns);
  }
  __device__ __forceinline__ static Operands operands_of(const LayerNormBackwardArgs& args,
                                                         std::int64_t row) {
    const std::int64_t first = row * args.shape.columns;
    return {{args.grad_output, first, columns_of(args)}, {args.source, first, columns_of(args)}};
  }
};

/// Stores the block's slice of partial sums, given each thread's sums for its columns.
template <std::uint32_t kThreads, class T, int kVec>
__device__ __forceinline__ void store_slice(const LayerNormBackwardArgs& args,
                                            const T (&column_sums)[kBackwardKept][2][kVec]) {
#pragma unroll
  for (int k = 0; k < kBackwardKept; ++k) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      store_column_sums(
          column_sums[k][which], kThreads, static_cast<std::uint32_t>(k) * kThreads * kVec,
          static_cast<std::uint32_t>(args.shape.columns), partials_of<T>(args, blockIdx.x, which));
    }
  }
}

// A team of threads handles one row at a time. Bytes per element: the gradient and source are read
// once if the row fits in registers, and the input's gradient is written. With kFits, each block
// also writes a slice of partial sums: see Note [Gradients in one pass]. The team loads its next
// row before it handles a row, if there are enough registers.
template <class S, class O, bool kFromOutput, std::uint32_t kThreads, bool kFits, bool kAligned>
__global__ void __launch_bounds__(kRowThreads, kBackwardBlocks)
    layer_norm_backward_kernel(const LayerNormBackwardArgs __grid_constant__ launch) {
  using T = RowCompute<S>;
  constexpr int kVec = kRowVec<S>;
  const LayerNormShape& shape = launch.shape;
  const auto columns = static_cast<std::uint32_t>(shape.columns);
  T column_sums[kBackwardKept][2][kVec] = {};
  RowTeam<kThreads> team;
  using Gradients = RowGradients<S, O, kFromOutput, kThreads, kFits, kAligned>;
  constexpr bool kLoadsAhead = kAligned && !kFromOutput;
  Gradients gradients(launch, team.first_row(), team.lane);
  for (std::int64_t row = team.first_row(); row < shape.rows; row += team.row_step()) {
    const std::int64_t next = row + team.row_step();
    const Gradients ahead(launch, kLoadsAhead ? next : shape.rows, team.lane);
    RowSums<T, 2, kThreads, kFits> sums;
    gradients.for_each(
        launch,
        [&](std::uint32_t, int, T, T g, T x_hat) {
          // Beyond the row's end, the gradient is 0.
          sums.recent[0] = sums.recent[0] + g;
          sums.recent[1] = fma(g, x_hat, sums.recent[1]);
        },
        [&](std::uint32_t vector) { sums.end_vector(vector); });
    T mean_g;
    T minus_mean_g_x_hat;
    sums.template over_team<kVec>(team, columns, [&]<class N>(const N(&totals)[2]) {
      const N count = static_cast<N>(columns);
      mean_g = shape.rms ? T(0) : static_cast<T>(totals[0] / count);
      minus_mean_g_x_hat = static_cast<T>(-totals[1] / count);
    });
    const RowOperand<S, kVec, kAligned> grad_input(launch.grad_input, row * shape.columns, columns);
    T result[kVec];
    gradients.for_each(
        launch,
        [&](std::uint32_t k, int j, T dy, T g, T x_hat) {
          if constexpr (kFits) {
            column_sums[k][0][j] = fma(dy, x_hat, column_sums[k][0][j]);
            column_sums[k][1][j] = column_sums[k][1][j] + dy;
          }
          result[j] = layer_norm_grad_input(g, x_hat, mean_g, minus_mean_g_x_hat, gradients.rstd);
        },
        [&](std::uint32_t vector) {
          if (launch.grad_input == nullptr) return;
          RawVec<S, kVec> raw;
#pragma unroll
          for (int pair = 0; pair < kVec / 2; ++pair) {
            const T two[2] = {result[2 * pair], result[2 * pair + 1]};
            set_pair(raw, pair, two);
          }
          grad_input.store(vector, raw);
        });
    gradients = kLoadsAhead ? ahead : Gradients(launch, next, team.lane);
  }
  if constexpr (kFits) {
    if (launch.partials != nullptr) store_slice<kThreads>(launch, column_sums);
  }
}

// --- Gradients of weight and bias ----------------------------------------------------------------

struct ColumnSumsLaunch {
  LayerNormBackwardArgs args;
  std::int64_t slice_rows;
  std::uint32_t tiles;  ///< tiles of a warp's vectors
};

// A block handles a tile of columns, a warp's vectors, within a slice of rows, and writes the
// slice's partial sums. Bytes per element: the gradient and source are read once.
template <class S, class O, bool kFromOutput, bool kAligned>
__global__ void __launch_bounds__(kRowThreads)
    layer_norm_column_sums_kernel(const ColumnSumsLaunch __grid_constant__ launch) {
  using T = RowCompute<S>;
  using RowXHat = XHat<S, O, kFromOutput, kAligned>;
  using Source = typename RowXHat::Source;
  constexpr int kVec = kRowVec<S>;
  const LayerNormBackwardArgs& args = launch.args;
  const LayerNormShape& shape = args.shape;
  const auto columns = static_cast<std::uint32_t>(shape.columns);
  const std::uint32_t tile = blockIdx.x % launch.tiles;
  const std::int64_t slice = blockIdx.x / launch.tiles;
  const std::uint32_t vector = tile * kRowWarpThreads + threadIdx.x % kRowWarpThreads;
  const std::int64_t begin = slice * launch.slice_rows;
  const std::int64_t end =
      begin + launch.slice_rows < shape.rows ? begin + launch.slice_rows : shape.rows;
  T sums[2][kVec] = {};
  if (vector * kVec < columns) {
    T weights[kVec];
    load_weights<S, kAligned>(args, vector, weights);
    const RowXHat x_hat(args, vector, weights);
#pragma unroll 2
    for (std::int64_t row = begin + threadIdx.x / kRowWarpThreads; row < end; row += kRowWarps) {
      const std::int64_t first = row * shape.columns;
      const auto dy_raw =
          RowOperand<O, kVec, kAligned>(args.grad_output, first, columns).load(vector);
      const auto raw = RowOperand<Source, kVec, kAligned>(args.source, first, columns).load(vector);
      const T mean = mean_of_row<T, kFromOutput>(args, row);
      const T rstd = static_cast<const T*>(args.rstd)[row];
#pragma unroll
      for (int pair = 0; pair < kVec / 2; ++pair) {
        T grads[2];
        T values[2];
        get_pair(dy_raw, pair, grads);
        get_pair(raw, pair, values);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int j = 2 * pair + i;
          sums[0][j] = fma(grads[i], x_hat(values[i], j, mean, rstd), sums[0][j]);
          sums[1][j] = sums[1][j] + grads[i];
        }
      }
    }
  }
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    store_column_sums(sums[which], kRowWarpThreads, tile * kRowWarpThreads * kVec, columns,
                      partials_of<T>(args, slice, which));
  }
}

struct ColumnTotalsLaunch {
  LayerNormBackwardArgs args;
  std::int64_t slices;
};

/// Sums of each warp's slices.
struct ColumnTotalsShared {
  double sums[2][kRowWarps][kRowWarpThreads];
};

// A block adds the partial sums of 32 columns in fp64: each warp those of every eighth slice.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    layer_norm_column_totals_kernel(const ColumnTotalsLaunch __grid_constant__ launch) {
  const LayerNormBackwardArgs& args = launch.args;
  const std::uint32_t warp = threadIdx.x / kRowWarpThreads;
  const std::uint32_t lane = threadIdx.x % kRowWarpThreads;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kRowWarpThreads + lane;
  double sums[2] = {};
  if (column < args.shape.columns) {
#pragma unroll 4
    for (std::int64_t slice = warp; slice < launch.slices; slice += kRowWarps) {
      sums[0] += static_cast<double>(partials_of<T>(args, slice, 0)[column]);
      sums[1] += static_cast<double>(partials_of<T>(args, slice, 1)[column]);
    }
  }
  auto& shared = block_shared<ColumnTotalsShared>().sums;
  shared[0][warp][lane] = sums[0];
  shared[1][warp][lane] = sums[1];
  __syncthreads();
  if (warp >= 2 || column >= args.shape.columns) return;
  double total = 0.0;
#pragma unroll
  for (std::uint32_t other = 0; other < kRowWarps; ++other) total += shared[warp][other][lane];
  store_channel(warp == 0 ? args.grad_weight : args.grad_bias, column, total);
}

}  // namespace torchfuse::kernels::cuda
