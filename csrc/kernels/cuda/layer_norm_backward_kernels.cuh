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

#include <type_traits>

#include "kernels/cuda/layer_norm_types.cuh"
#include "kernels/layer_norm_backward.h"

namespace torchfuse::kernels::cuda {

__device__ __forceinline__ std::uint32_t columns_of(const LayerNormBackwardArgs& args) {
  return static_cast<std::uint32_t>(args.shape.columns);
}

// --- Columns and rows ----------------------------------------------------------------------------

/// Weights, and biases if x_hat is computed from the output, of rows that fit the registers.
template <class T, int kColumns, bool kBiases>
struct ColumnParamsShared {
  alignas(16) T weights[kColumns];
  alignas(16) T biases[kBiases ? kColumns : 1];
};

/// The weights and biases of a block's columns. With `kFits` they are in shared memory, so that in
/// the loop over rows only rows are loaded from memory, and a load ahead waits for no other load.
template <class S, bool kFromOutput, bool kFits, bool kAligned>
class ColumnParams {
 public:
  using T = RowCompute<S>;
  static constexpr int kVec = kRowVec<S>;

  /// All threads of the block must take part.
  __device__ __forceinline__ explicit ColumnParams(const LayerNormBackwardArgs& args)
      : args_(args) {
    if constexpr (kFits) {
      const std::uint32_t columns = columns_of(args);
      const std::uint32_t padded = (columns + kVec - 1) / kVec * kVec;
      for (std::uint32_t c = threadIdx.x; c < padded; c += kRowThreads) {
        const bool inside = c < columns;
        shared().weights[c] = static_cast<T>(inside ? load_channel(args.weight, c, 1.0) : 1.0);
        if constexpr (kFromOutput) {
          shared().biases[c] = static_cast<T>(inside ? load_channel(args.bias, c, 0.0) : 0.0);
        }
      }
      __syncthreads();
    }
  }

  __device__ __forceinline__ void load_weights(std::uint32_t vector, T (&values)[kVec]) const {
    if constexpr (kFits) {
      memcpy(values, &shared().weights[vector * kVec], sizeof values);
    } else {
      load_columns<S, kAligned>(args_.weight, columns_of(args_), vector, T(1), values);
    }
  }
  __device__ __forceinline__ void load_biases(std::uint32_t vector, T (&values)[kVec]) const {
    if constexpr (kFits) {
      memcpy(values, &shared().biases[vector * kVec], sizeof values);
    } else {
      load_columns<S, kAligned>(args_.bias, columns_of(args_), vector, T(0), values);
    }
  }

 private:
  static constexpr int kColumns = kLayerNormKeptBytes / static_cast<int>(sizeof(S));
  __device__ __forceinline__ static auto& shared() {
    return block_shared<ColumnParamsShared<T, kColumns, kFromOutput>>();
  }

  const LayerNormBackwardArgs& args_;
};

/// Computes x_hat for a vector's columns, given their weights.
template <class S, class O, bool kFromOutput>
struct XHat {
  using Source = std::conditional_t<kFromOutput, O, S>;
  using T = RowCompute<S>;
  static constexpr int kVec = kRowVec<S>;
  T bias[kVec];
  T inverse[kVec];

  template <class Params>
  __device__ __forceinline__ XHat(const Params& params, std::uint32_t vector,
                                  const T (&weights)[kVec]) {
    if constexpr (kFromOutput) {
      params.load_biases(vector, bias);
#pragma unroll
      for (int i = 0; i < kVec; ++i) inverse[i] = inverse_weight(weights[i]);
    }
  }

  __device__ __forceinline__ T operator()(T source, int i, const RowStatistics<T>& row) const {
    if constexpr (kFromOutput) {
      return x_hat_of_output(source, bias[i], inverse[i]);
    } else {
      return x_hat_of_input(source, row.mean, row.rstd);
    }
  }
};

/// Returns a row's statistics; the mean is 0 if x_hat does not need it.
template <class T, bool kFromOutput>
__device__ __forceinline__ RowStatistics<T> statistics_of_row(const LayerNormBackwardArgs& args,
                                                              std::int64_t row) {
  const bool centers = !kFromOutput && !args.shape.rms;
  return {centers ? static_cast<const T*>(args.mean)[row] : T(0),
          static_cast<const T*>(args.rstd)[row]};
}

/// A row's gradient and source.
template <class S, class O, bool kFromOutput, bool kAligned>
struct GradientOperands {
  static constexpr int kVec = kRowVec<S>;
  using Source = std::conditional_t<kFromOutput, O, S>;
  RowOperand<O, kVec, kAligned> dy;
  RowOperand<Source, kVec, kAligned> source;

  struct Loaded {
    RawVec<O, kVec> dy;
    RawVec<Source, kVec> source;
  };

  __device__ __forceinline__ GradientOperands(const LayerNormBackwardArgs& args, std::int64_t row)
      : dy(args.grad_output, row * args.shape.columns, columns_of(args)),
        source(args.source, row * args.shape.columns, columns_of(args)) {}

  __device__ __forceinline__ Loaded load(std::uint32_t vector) const {
    return {dy.load(vector), source.load(vector)};
  }

  /// Calls body(j, dy, x_hat) for each element of a loaded vector.
  template <class T, class Body>
  __device__ __forceinline__ void for_each(std::uint32_t vector, const Loaded& loaded,
                                           const XHat<S, O, kFromOutput>& x_hat,
                                           const RowStatistics<T>& of_row, const Body& body) const {
#pragma unroll
    for (int pair = 0; pair < kVec / 2; ++pair) {
      T grads[2];
      T values[2];
      get_pair(loaded.dy, pair, grads);
      get_pair(loaded.source, pair, values);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int j = 2 * pair + i;
        // Beyond the row's end, dy is 0, and 0 times infinity would be NaN.
        body(j, grads[i], dy.has(vector, j) ? x_hat(values[i], j, of_row) : T(0));
      }
    }
  }
};

// --- Sums over rows ------------------------------------------------------------------------------

/// Each thread's sums for one vector.
template <class T, int kVec>
struct ColumnSumsShared {
  T sums[kRowThreads * kVec];
};

/// Adds the sums of a block's threads over the threads `lanes` apart, which have the same columns.
/// Stores the results from `column` on, `lanes` * kVec of them, in a slice of partial sums, or with
/// `adds` adds them to the slice.
template <class T, int kVec>
__device__ __forceinline__ void store_column_sums(const T (&sums)[kVec], std::uint32_t lanes,
                                                  std::uint32_t column, std::uint32_t columns,
                                                  bool adds, T* slice) {
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
    slice[column + i] = adds ? slice[column + i] + sum : sum;
  }
}

/// Returns a slice's partial sums for the weight (0) or the bias (1).
template <class T>
__device__ __forceinline__ T* partials_of(const LayerNormBackwardArgs& args, std::int64_t slice,
                                          int which) {
  return static_cast<T*>(args.partials) + (slice * 2 + which) * padded_columns(args.shape.columns);
}

/// A thread's sums over rows for its columns. After every kTogether rows, they move to the block's
/// slice of partial sums, so that errors do not grow with the number of rows.
template <class T, int kVec, int kKept, std::uint32_t kThreads>
struct SliceSums {
  static constexpr std::uint32_t kTogether = 64;
  T sums[kKept][2][kVec] = {};
  std::uint32_t rows = 0;

  __device__ __forceinline__ void add(std::uint32_t k, int j, T dy, T x_hat) {
    sums[k][0][j] = fma(dy, x_hat, sums[k][0][j]);
    sums[k][1][j] = sums[k][1][j] + dy;
  }

  /// Must be called by all threads of the block after each row.
  __device__ __forceinline__ void end_row(const LayerNormBackwardArgs& args, bool last) {
    ++rows;
    if (args.partials == nullptr || (rows % kTogether != 0 && !last)) return;
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        store_column_sums(sums[k][which], kThreads, static_cast<std::uint32_t>(k) * kThreads * kVec,
                          columns_of(args), rows > kTogether,
                          partials_of<T>(args, blockIdx.x, which));
#pragma unroll
        for (int j = 0; j < kVec; ++j) sums[k][which][j] = T(0);
      }
    }
  }
};

// --- Gradients of rows ---------------------------------------------------------------------------

/// Vectors that a thread keeps: two in a block and four in a warp, which thus handles rows of up to
/// 1,024 16-bit elements. Two in a warp too if four would not fit the registers.
template <class S, class O, bool kFromOutput, std::uint32_t kThreads>
constexpr int kBackwardKept =
    kThreads == kRowWarpThreads && (sizeof(S) > 2 || (sizeof(O) == 2 && !kFromOutput)) ? 4 : 2;
/// Resident blocks per multiprocessor.
template <bool kFits, bool kAligned>
constexpr int kBackwardBlocks = kFits && !kAligned ? 1 : 2;

/// The calling thread's vectors in a row's gradient and source.
template <class S, class O, bool kFromOutput, std::uint32_t kThreads, bool kFits, bool kAligned>
struct RowGradients {
  using T = RowCompute<S>;
  using Operands = GradientOperands<S, O, kFromOutput, kAligned>;
  static constexpr int kVec = kRowVec<S>;
  static constexpr int kKept = kBackwardKept<S, O, kFromOutput, kThreads>;
  RowStatistics<T> of_row;
  RowVectors<Operands, kVec, kKept, kThreads, kFits> vectors;

  /// Loads a row; nothing if there is no such row.
  __device__ __forceinline__ RowGradients(const LayerNormBackwardArgs& args, std::int64_t row,
                                          std::uint32_t lane)
      : vectors(Operands(args, row), row < args.shape.rows ? columns_of(args) : 0, lane) {
    if (row < args.shape.rows) of_row = statistics_of_row<T, kFromOutput>(args, row);
  }

  /// Calls body(k, j, dy, g, x_hat) for each element of a vector, vector k of kKept at a time, then
  /// at_end(vector).
  template <class Params, class Body, class AtEnd>
  __device__ __forceinline__ void for_each(const Params& params, const Body& body,
                                           const AtEnd& at_end) const {
    vectors.for_each([&](std::uint32_t k, std::uint32_t vector, const auto& loaded) {
      T weights[kVec];
      params.load_weights(vector, weights);
      const XHat<S, O, kFromOutput> x_hat(params, vector, weights);
      vectors.source.for_each(vector, loaded, x_hat, of_row, [&](int j, T dy, T value) {
        body(k, j, dy, dy * weights[j], value);
      });
      at_end(vector);
    });
  }
};

// A team of threads handles one row at a time. Bytes per element: the gradient and source are read
// once if the row fits in registers, and the input's gradient is written. With kFits, each block
// also writes a slice of partial sums: see Note [Gradients in one pass]. A block's team loads its
// next row before it handles a row, if registers allow. Warps have enough loads in flight.
template <class S, class O, bool kFromOutput, std::uint32_t kThreads, bool kFits, bool kAligned>
__global__ void __launch_bounds__(kRowThreads, kBackwardBlocks<kFits, kAligned>)
    layer_norm_backward_kernel(const LayerNormBackwardArgs __grid_constant__ launch) {
  using T = RowCompute<S>;
  constexpr int kVec = kRowVec<S>;
  constexpr int kKept = kBackwardKept<S, O, kFromOutput, kThreads>;
  constexpr bool kLoadsAhead =
      kThreads == kRowThreads && kAligned && (!kFromOutput || sizeof(S) == sizeof(O));
  using Gradients = RowGradients<S, O, kFromOutput, kThreads, kFits, kAligned>;
  const LayerNormShape& shape = launch.shape;
  const std::uint32_t columns = columns_of(launch);
  const ColumnParams<S, kFromOutput, kFits, kAligned> params(launch);
  SliceSums<T, kVec, kKept, kThreads> slice;
  RowTeam<kThreads> team;
  Gradients gradients(launch, team.first_row(), team.lane);
  // All teams of a block make equally many rounds, the last one perhaps without a row.
  const std::int64_t number = threadIdx.x / kThreads;
  for (std::int64_t row = team.first_row(); row - number < shape.rows; row += team.row_step()) {
    const std::int64_t next = row + team.row_step();
    const Gradients ahead(launch, kLoadsAhead ? next : shape.rows, team.lane);
    RowSums<T, 2, kThreads, kFits> sums;
    gradients.for_each(
        params,
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
        params,
        [&](std::uint32_t k, int j, T dy, T g, T x_hat) {
          if constexpr (kFits) slice.add(k, j, dy, x_hat);
          result[j] =
              layer_norm_grad_input(g, x_hat, mean_g, minus_mean_g_x_hat, gradients.of_row.rstd);
        },
        [&](std::uint32_t vector) {
          if (!kFits || launch.grad_input != nullptr) grad_input.store(vector, to_raw<S>(result));
        });
    if constexpr (kFits) slice.end_row(launch, next - number >= shape.rows);
    gradients = kLoadsAhead ? ahead : Gradients(launch, next, team.lane);
  }
}

// --- Gradients of weight and bias ----------------------------------------------------------------

struct ColumnSumsLaunch {
  LayerNormBackwardArgs args;
  std::int64_t slice_rows;
  std::uint32_t tiles;  ///< tiles of a warp's vectors
};

// A block handles a tile of columns, a warp's vectors, within a slice of rows, and writes the
// slice's partial sums. Bytes per element: the gradient and source are read once. A thread has two
// rows in flight.
template <class S, class O, bool kFromOutput, bool kAligned>
__global__ void __launch_bounds__(kRowThreads)
    layer_norm_column_sums_kernel(const ColumnSumsLaunch __grid_constant__ launch) {
  using T = RowCompute<S>;
  using Operands = GradientOperands<S, O, kFromOutput, kAligned>;
  constexpr int kVec = kRowVec<S>;
  constexpr int kRows = 2;
  const LayerNormBackwardArgs& args = launch.args;
  const std::uint32_t columns = columns_of(args);
  const std::uint32_t tile = blockIdx.x % launch.tiles;
  const std::int64_t slice = blockIdx.x / launch.tiles;
  const std::uint32_t vector = tile * kRowWarpThreads + threadIdx.x % kRowWarpThreads;
  const std::int64_t first = slice * launch.slice_rows;
  const std::int64_t end =
      first + launch.slice_rows < args.shape.rows ? first + launch.slice_rows : args.shape.rows;
  T sums[2][kVec] = {};
  if (vector * kVec < columns) {
    const ColumnParams<S, kFromOutput, false, kAligned> params(args);
    T weights[kVec];
    params.load_weights(vector, weights);
    const XHat<S, O, kFromOutput> x_hat(params, vector, weights);
    for (std::int64_t warp_row = first + threadIdx.x / kRowWarpThreads; warp_row < end;
         warp_row += kRows * kRowWarps) {
      typename Operands::Loaded loaded[kRows];
      RowStatistics<T> of_row[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const std::int64_t row = warp_row + r * std::int64_t{kRowWarps};
        if (row >= end) continue;
        loaded[r] = Operands(args, row).load(vector);
        of_row[r] = statistics_of_row<T, kFromOutput>(args, row);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const std::int64_t row = warp_row + r * std::int64_t{kRowWarps};
        if (row >= end) continue;
        Operands(args, row).for_each(vector, loaded[r], x_hat, of_row[r],
                                     [&](int j, T dy, T value) {
                                       sums[0][j] = fma(dy, value, sums[0][j]);
                                       sums[1][j] = sums[1][j] + dy;
                                     });
      }
    }
  }
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    store_column_sums(sums[which], kRowWarpThreads, tile * kRowWarpThreads * kVec, columns, false,
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
