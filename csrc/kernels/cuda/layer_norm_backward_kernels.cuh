// SPDX-License-Identifier: BSD-3-Clause
// Kernels for layer normalization's backward pass.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <type_traits>

#include "kernels/cuda/layer_norm_types.cuh"
#include "kernels/layer_norm_backward.h"

namespace torchfuse::kernels::cuda {

/// Computes x_hat for a vector's columns.
template <class S, class O, bool kFromOutput>
struct XHat {
  using Source = std::conditional_t<kFromOutput, O, S>;
  using T = RowCompute<S>;
  static constexpr int kVec = kRowVec<S>;
  T bias[kVec];
  T inverse[kVec];

  __device__ __forceinline__ XHat(const LayerNormBackwardArgs& args, std::uint32_t columns,
                                  std::uint32_t vector) {
    if constexpr (kFromOutput) {
      load_columns<S>(args.bias, columns, vector, T(0), bias);
      load_columns<S>(args.weight, columns, vector, T(1), inverse);
#pragma unroll
      for (int i = 0; i < kVec; ++i) inverse[i] = inverse_weight(inverse[i]);
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

// --- Gradient of the input -----------------------------------------------------------------------

constexpr int kBackwardKept = 2;
/// Resident blocks per multiprocessor; fewer if a thread keeps vectors that are twice as wide.
template <class S, class O>
constexpr int kBackwardBlocks = sizeof(S) == sizeof(O) ? 3 : 2;

/// The calling thread's vectors in a row's gradient and source.
template <class S, class O, bool kFromOutput, std::uint32_t kThreads>
struct RowGradients {
  using T = RowCompute<S>;
  using RowXHat = XHat<S, O, kFromOutput>;
  static constexpr int kVec = kRowVec<S>;
  const LayerNormBackwardArgs& args;
  std::uint32_t columns;
  T mean;
  T rstd;
  RowVectors<O, kVec, kBackwardKept, kThreads> dy;
  RowVectors<typename RowXHat::Source, kVec, kBackwardKept, kThreads> source;

  __device__ __forceinline__ RowGradients(const LayerNormBackwardArgs& launch, std::int64_t row,
                                          std::uint32_t lane)
      : args(launch),
        columns(static_cast<std::uint32_t>(launch.shape.columns)),
        mean(mean_of_row<T, kFromOutput>(launch, row)),
        rstd(static_cast<const T*>(launch.rstd)[row]),
        dy(launch.grad_output, row * launch.shape.columns, columns, lane),
        source(launch.source, row * launch.shape.columns, columns, lane) {}

  /// Calls body(i, g, x_hat) for each element of a vector, then at_end(vector).
  template <class Body, class AtEnd>
  __device__ __forceinline__ void for_each(const Body& body, const AtEnd& at_end) const {
    for_each_of_two(dy, source, [&](std::uint32_t vector, const auto& dy_raw, const auto& raw) {
      const RowXHat x_hat(args, columns, vector);
      T weight[kVec];
      load_columns<S>(args.weight, columns, vector, T(1), weight);
#pragma unroll
      for (int pair = 0; pair < kVec / 2; ++pair) {
        T grads[2];
        T values[2];
        get_pair(dy_raw, pair, grads);
        get_pair(raw, pair, values);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int j = 2 * pair + i;
          // Beyond the row's end, 0 times infinity would be NaN.
          const bool inside = vector * kVec + static_cast<std::uint32_t>(j) < columns;
          body(j, grads[i] * weight[j], inside ? x_hat(values[i], j, mean, rstd) : T(0));
        }
      }
      at_end(vector);
    });
  }
};

// A team of threads handles one row at a time. Bytes per element: the gradient and source are read
// once if the row fits in registers, and the input's gradient is written.
template <class S, class O, bool kFromOutput, std::uint32_t kThreads>
__global__ void __launch_bounds__(kRowThreads, kBackwardBlocks<S, O>)
    layer_norm_grad_input_kernel(const LayerNormBackwardArgs __grid_constant__ launch) {
  using T = RowCompute<S>;
  constexpr int kVec = kRowVec<S>;
  const LayerNormShape& shape = launch.shape;
  RowTeam<kThreads> team;
  for (std::int64_t row = team.first_row(); row < shape.rows; row += team.row_step()) {
    const RowGradients<S, O, kFromOutput, kThreads> gradients(launch, row, team.lane);
    RowSums<T, 2, kThreads> sums;
    gradients.for_each(
        [&](int, T g, T x_hat) {
          // Beyond the row's end, the gradient is 0.
          sums.recent[0] = sums.recent[0] + g;
          sums.recent[1] = fma(g, x_hat, sums.recent[1]);
        },
        [&](std::uint32_t vector) { sums.end_vector(vector); });
    T mean_g;
    T minus_mean_g_x_hat;
    sums.template over_team<kVec>(team, gradients.columns, [&]<class N>(const N(&totals)[2]) {
      const N count = static_cast<N>(gradients.columns);
      mean_g = shape.rms ? T(0) : static_cast<T>(totals[0] / count);
      minus_mean_g_x_hat = static_cast<T>(-totals[1] / count);
    });
    const RowOperand<S, kVec> grad_input(launch.grad_input, row * shape.columns, gradients.columns);
    T result[kVec];
    gradients.for_each(
        [&](int j, T g, T x_hat) {
          result[j] = layer_norm_grad_input(g, x_hat, mean_g, minus_mean_g_x_hat, gradients.rstd);
        },
        [&](std::uint32_t vector) {
          RawVec<S, kVec> raw;
#pragma unroll
          for (int pair = 0; pair < kVec / 2; ++pair) {
            const T two[2] = {result[2 * pair], result[2 * pair + 1]};
            set_pair(raw, pair, two);
          }
          grad_input.store(vector, raw);
        });
  }
}

// --- Gradients of weight and bias ----------------------------------------------------------------

struct ColumnSumsLaunch {
  LayerNormBackwardArgs args;
  std::int64_t slice_rows;
  std::uint32_t tiles;  ///< tiles of `lanes` vectors
  std::uint32_t lanes;  ///< adjacent threads in a row: a power of two
};

/// Each thread's sums, first for the weight and then for the bias.
template <class T, int kVec>
struct ColumnSumsShared {
  T sums[kRowThreads * kVec];
};

// A block handles a tile of columns within a slice of rows and writes the slice's partial sums.
// Bytes per element: the gradient and source are read once.
template <class S, class O, bool kFromOutput>
__global__ void __launch_bounds__(kRowThreads)
    layer_norm_column_sums_kernel(const ColumnSumsLaunch __grid_constant__ launch) {
  using T = RowCompute<S>;
  using RowXHat = XHat<S, O, kFromOutput>;
  using Source = typename RowXHat::Source;
  constexpr int kVec = kRowVec<S>;
  const LayerNormBackwardArgs& args = launch.args;
  const LayerNormShape& shape = args.shape;
  const auto columns = static_cast<std::uint32_t>(shape.columns);
  const std::uint32_t tile = blockIdx.x % launch.tiles;
  const std::int64_t slice = blockIdx.x / launch.tiles;
  const std::uint32_t lane = threadIdx.x % launch.lanes;
  const std::uint32_t vector = tile * launch.lanes + lane;
  const std::uint32_t row_lanes = kRowThreads / launch.lanes;
  const std::int64_t begin = slice * launch.slice_rows;
  const std::int64_t end =
      begin + launch.slice_rows < shape.rows ? begin + launch.slice_rows : shape.rows;
  T sums[2][kVec] = {};
  if (vector * kVec < columns) {
    const RowXHat x_hat(args, columns, vector);
    for (std::int64_t row = begin + threadIdx.x / launch.lanes; row < end; row += row_lanes) {
      const std::int64_t first = row * shape.columns;
      const auto dy_raw = RowOperand<O, kVec>(args.grad_output, first, columns).load(vector);
      const auto raw = RowOperand<Source, kVec>(args.source, first, columns).load(vector);
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
  auto& shared = block_shared<ColumnSumsShared<T, kVec>>().sums;
  const std::uint32_t tile_columns = launch.lanes * kVec;
  const std::uint32_t column = tile * tile_columns + threadIdx.x;
  T* partials = static_cast<T*>(args.partials) + slice * 2 * padded_columns(shape.columns);
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kVec; ++j) shared[threadIdx.x * kVec + j] = sums[which][j];
    __syncthreads();
    if (threadIdx.x < tile_columns && column < columns) {
      T sum = shared[threadIdx.x];
      for (std::uint32_t r = 1; r < row_lanes; ++r) {
        sum = sum + shared[r * tile_columns + threadIdx.x];
      }
      partials[which * padded_columns(shape.columns) + column] = sum;
    }
  }
}

struct ColumnTotalsLaunch {
  LayerNormBackwardArgs args;
  std::int64_t slices;
};

// Each thread adds one column's partial sums in fp64.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    layer_norm_column_totals_kernel(const ColumnTotalsLaunch __grid_constant__ launch) {
  const LayerNormBackwardArgs& args = launch.args;
  const std::int64_t padded = padded_columns(args.shape.columns);
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (column >= args.shape.columns) return;
  const T* partials = static_cast<const T*>(args.partials) + column;
  double weight_sum = 0.0;
  double bias_sum = 0.0;
#pragma unroll 4
  for (std::int64_t slice = 0; slice < launch.slices; ++slice) {
    weight_sum += static_cast<double>(partials[slice * 2 * padded]);
    bias_sum += static_cast<double>(partials[(slice * 2 + 1) * padded]);
  }
  store_channel(args.grad_weight, column, weight_sum);
  store_channel(args.grad_bias, column, bias_sum);
}

}  // namespace torchfuse::kernels::cuda
