// SPDX-License-Identifier: BSD-3-Clause
// Layer and RMS normalization. A team of threads handles one row at a time: a warp if the row fits
// in its registers (8 teams per block), otherwise a block of 256 threads. Bytes per element: the
// input is read once if the row fits in registers, and the output is written.
#include "kernels/layer_norm.h"

#include <type_traits>

#include "kernels/cuda/layer_norm_types.cuh"

namespace torchfuse::kernels {

namespace cuda {

constexpr int kForwardKept = 4;
/// Resident blocks per multiprocessor; fewer if output vectors are twice as wide as input vectors,
/// and for rows that do not fit the registers.
template <class S, class O, bool kFits>
constexpr int kForwardBlocks = !kFits                   ? 2
                               : sizeof(S) == sizeof(O) ? 4
                                                        : 3;

/// Returns the sum that body(sum, element, inside) accumulates over a row, divided by the column
/// count. Also calls body for zeros beyond the row's end, which are not inside.
template <class S, std::uint32_t kThreads, class Row, class Body>
__device__ __forceinline__ RowCompute<S> mean_over_row(const Row& row, RowTeam<kThreads>& team,
                                                       const Body& body) {
  using T = RowCompute<S>;
  constexpr int kVec = kRowVec<S>;
  RowSums<T, 1, kThreads, Row::kInRegisters> sums;
  row.for_each([&](std::uint32_t, std::uint32_t vector, const RawVec<S, kVec>& raw) {
#pragma unroll
    for (int pair = 0; pair < kVec / 2; ++pair) {
      T two[2];
      get_pair(raw, pair, two);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        body(sums.recent[0], two[i], row.source.has(vector, 2 * pair + i));
      }
    }
    sums.end_vector(vector);
  });
  T mean;
  const std::uint32_t columns = row.columns;
  sums.template over_team<kVec>(team, columns, [&]<class N>(const N(&totals)[1]) {
    mean = static_cast<T>(totals[0] / static_cast<N>(columns));
  });
  return mean;
}

template <class S, std::uint32_t kThreads, class Row>
__device__ __forceinline__ RowStatistics<RowCompute<S>> statistics_of(const Row& row,
                                                                      RowTeam<kThreads>& team,
                                                                      const LayerNormArgs& args) {
  using T = RowCompute<S>;
  T mean(0);
  if (!args.shape.rms) {
    mean = mean_over_row<S>(row, team, [](T& sum, T x, bool) { sum = sum + x; });
  }
  const T mean_square = mean_over_row<S>(row, team, [&](T& sum, T x, bool inside) {
    const T deviation = x - mean;
    if (inside) sum = fma(deviation, deviation, sum);
  });
  return {mean, row_rstd(mean_square, static_cast<T>(args.eps))};
}

template <class S, class O, std::uint32_t kThreads, bool kFits, bool kAligned>
__global__ void __launch_bounds__(kRowThreads, kForwardBlocks<S, O, kFits>)
    layer_norm_kernel(const LayerNormArgs __grid_constant__ launch) {
  using T = RowCompute<S>;
  using Input = RowOperand<S, kRowVec<S>, kAligned>;
  constexpr int kVec = kRowVec<S>;
  const LayerNormShape& shape = launch.shape;
  const auto columns = static_cast<std::uint32_t>(shape.columns);
  RowTeam<kThreads> team;
  for (std::int64_t row = team.first_row(); row < shape.rows; row += team.row_step()) {
    const Input input(launch.input, row * shape.columns, columns);
    const RowVectors<Input, kVec, kForwardKept, kThreads, kFits> x(input, columns, team.lane);
    const RowStatistics<T> is = statistics_of<S>(x, team, launch);
    if (team.lane == 0) {
      if (!shape.rms) static_cast<T*>(launch.mean)[row] = is.mean;
      static_cast<T*>(launch.rstd)[row] = is.rstd;
    }
    const RowOperand<O, kVec, kAligned> output(launch.output, row * shape.columns, columns);
    x.for_each([&](std::uint32_t, std::uint32_t vector, const RawVec<S, kVec>& raw) {
      T weight[kVec];
      T bias[kVec];
      load_columns<S, kAligned>(launch.weight, columns, vector, T(1), weight);
      load_columns<S, kAligned>(launch.bias, columns, vector, T(0), bias);
      RawVec<O, kVec> result;
#pragma unroll
      for (int pair = 0; pair < kVec / 2; ++pair) {
        T two[2];
        get_pair(raw, pair, two);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          two[i] = layer_norm_output(x_hat_of_input(two[i], is.mean, is.rstd), weight[2 * pair + i],
                                     bias[2 * pair + i]);
        }
        set_pair(result, pair, two);
      }
      output.store(vector, result);
    });
  }
}

}  // namespace cuda

Status layer_norm_cuda(const LayerNormArgs& args, int multiprocessors, Stream stream) {
  using namespace cuda;
  constexpr const char* kWhat = "launch of layer_norm_kernel";
  return dispatch_rows(args.shape, kWhat, [&]<class S, class O>(S, O) {
    const auto run = [&]<bool kAligned>(std::bool_constant<kAligned>) {
      const std::int64_t columns = args.shape.columns;
      const bool warp = columns <= kFittingColumns<S, kForwardKept, kRowWarpThreads>;
      const bool fits = columns <= kFittingColumns<S, kForwardKept, kRowThreads>;
      const auto kernel = warp   ? layer_norm_kernel<S, O, kRowWarpThreads, true, kAligned>
                          : fits ? layer_norm_kernel<S, O, kRowThreads, true, kAligned>
                                 : layer_norm_kernel<S, O, kRowThreads, false, kAligned>;
      const std::uint32_t teams = warp ? RowTeam<kRowWarpThreads>::kTeams : 1;
      const int resident = fits ? kForwardBlocks<S, O, true> : kForwardBlocks<S, O, false>;
      return launch(kernel, args, row_blocks(args.shape.rows, teams, multiprocessors, resident),
                    kRowThreads, stream, kWhat);
    };
    const bool aligned = rows_are_aligned<S>(
        args.shape.columns, {args.input, args.output, args.weight.data, args.bias.data});
    return aligned ? run(std::true_type{}) : run(std::false_type{});
  });
}

}  // namespace torchfuse::kernels
