// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/layer_norm_backward.h"

#include <algorithm>

#include "kernels/cuda/layer_norm_backward_kernels.cuh"

namespace torchfuse::kernels {

namespace cuda {
namespace {

/// Launches the kernel for rows, if there is something to compute. Sets the number of slices of
/// partial sums that it writes: none if rows do not fit the registers.
template <class S, class O, bool kFromOutput, bool kAligned>
Status launch_rows_backward(const LayerNormBackwardArgs& args, int multiprocessors, Stream stream,
                            std::int64_t& slices) {
  constexpr auto kWarpKept = kBackwardKept<S, O, kFromOutput, kRowWarpThreads>;
  constexpr auto kBlockKept = kBackwardKept<S, O, kFromOutput, kRowThreads>;
  static_assert(kFittingColumns<S, kBlockKept, kRowThreads> * sizeof(S) == kLayerNormKeptBytes);
  const std::int64_t columns = args.shape.columns;
  const bool warp = columns <= kFittingColumns<S, kWarpKept, kRowWarpThreads>;
  const bool fits = columns <= kFittingColumns<S, kBlockKept, kRowThreads>;
  slices = 0;
  if (args.grad_input == nullptr && (!fits || args.partials == nullptr)) return Status{};
  const auto kernel =
      warp   ? layer_norm_backward_kernel<S, O, kFromOutput, kRowWarpThreads, true, kAligned>
      : fits ? layer_norm_backward_kernel<S, O, kFromOutput, kRowThreads, true, kAligned>
             : layer_norm_backward_kernel<S, O, kFromOutput, kRowThreads, false, kAligned>;
  const std::uint32_t teams = warp ? RowTeam<kRowWarpThreads>::kTeams : 1;
  // Registers allow three blocks of the kernel for long rows on most devices.
  const int resident = fits ? kBackwardBlocks<true, kAligned> : 3;
  std::uint32_t blocks = row_blocks(args.shape.rows, teams, multiprocessors, resident);
  if (fits) {
    slices = std::min<std::int64_t>(blocks, layer_norm_slices_cuda(args.shape));
    blocks = static_cast<std::uint32_t>(slices);
  }
  return launch(kernel, args, blocks, kRowThreads, stream, "launch of layer_norm_backward_kernel");
}

/// Splits rows into enough slices for two blocks per multiprocessor, but no more than `partials`
/// has room for.
template <class S, class O, bool kFromOutput, bool kAligned>
Status launch_column_sums(const LayerNormBackwardArgs& args, int multiprocessors, Stream stream,
                          std::int64_t& slices) {
  constexpr std::int64_t kTile = kFittingColumns<S, 1, kRowWarpThreads>;
  ColumnSumsLaunch sums{};
  sums.args = args;
  sums.tiles = static_cast<std::uint32_t>((args.shape.columns + kTile - 1) / kTile);
  const std::int64_t wanted = (2 * std::int64_t{multiprocessors} + sums.tiles - 1) / sums.tiles;
  const std::int64_t most = std::min(wanted, layer_norm_slices_cuda(args.shape));
  sums.slice_rows = (args.shape.rows + most - 1) / most;
  slices = (args.shape.rows + sums.slice_rows - 1) / sums.slice_rows;
  return launch(layer_norm_column_sums_kernel<S, O, kFromOutput, kAligned>, sums,
                sums.tiles * static_cast<std::uint32_t>(slices), kRowThreads, stream,
                "launch of layer_norm_column_sums_kernel");
}

template <class S, class O, bool kFromOutput, bool kAligned>
Status launch_all(const LayerNormBackwardArgs& args, int multiprocessors, Stream stream) {
  ColumnTotalsLaunch totals{args, 0};
  Status status = launch_rows_backward<S, O, kFromOutput, kAligned>(args, multiprocessors, stream,
                                                                    totals.slices);
  if (!status.ok() || args.partials == nullptr) return status;
  if (totals.slices == 0) {
    status = launch_column_sums<S, O, kFromOutput, kAligned>(args, multiprocessors, stream,
                                                             totals.slices);
    if (!status.ok()) return status;
  }
  const auto blocks =
      static_cast<std::uint32_t>((args.shape.columns + kRowWarpThreads - 1) / kRowWarpThreads);
  return launch(layer_norm_column_totals_kernel<RowCompute<S>>, totals, blocks, kRowThreads, stream,
                "launch of layer_norm_column_totals_kernel");
}

}  // namespace
}  // namespace cuda

Status layer_norm_backward_cuda(const LayerNormBackwardArgs& args, int multiprocessors,
                                Stream stream) {
  using namespace cuda;
  return dispatch_rows(args.shape, "dtype of layer_norm_backward", [&]<class S, class O>(S, O) {
    const void* bias = args.from_output ? args.bias.data : nullptr;
    const bool aligned = rows_are_aligned<S>(
        args.shape.columns,
        {args.grad_output, args.source, args.grad_input, args.weight.data, bias});
    if (args.from_output) {
      return aligned ? launch_all<S, O, true, true>(args, multiprocessors, stream)
                     : launch_all<S, O, true, false>(args, multiprocessors, stream);
    }
    return aligned ? launch_all<S, O, false, true>(args, multiprocessors, stream)
                   : launch_all<S, O, false, false>(args, multiprocessors, stream);
  });
}

}  // namespace torchfuse::kernels
