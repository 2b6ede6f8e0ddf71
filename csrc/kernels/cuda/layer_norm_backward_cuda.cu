// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/layer_norm_backward.h"

#include "kernels/cuda/layer_norm_backward_kernels.cuh"

namespace torchfuse::kernels {

namespace cuda {
namespace {

template <class S, class O, bool kFromOutput>
Status launch_grad_input(const LayerNormBackwardArgs& args, int multiprocessors, Stream stream) {
  return launch_rows<S, kBackwardKept, kBackwardBlocks<S, O>>(
      layer_norm_grad_input_kernel<S, O, kFromOutput, kRowWarpThreads>,
      layer_norm_grad_input_kernel<S, O, kFromOutput, kRowThreads>, args, args.shape.columns,
      multiprocessors, stream, "launch of layer_norm_grad_input_kernel");
}

/// Splits rows into enough slices for two blocks per multiprocessor, but no more than `partials`
/// has room for.
template <class S, class O, bool kFromOutput>
Status launch_column_sums(const LayerNormBackwardArgs& args, int multiprocessors, Stream stream) {
  constexpr std::uint32_t kMostLanes = 32;
  const std::int64_t vectors = (args.shape.columns + kRowVec<S> - 1) / kRowVec<S>;
  ColumnSumsLaunch sums{};
  sums.args = args;
  sums.lanes =
      vectors >= kMostLanes ? kMostLanes : std::bit_ceil(static_cast<std::uint32_t>(vectors));
  sums.tiles = static_cast<std::uint32_t>((vectors + sums.lanes - 1) / sums.lanes);
  const std::int64_t wanted = (2 * std::int64_t{multiprocessors} + sums.tiles - 1) / sums.tiles;
  const std::int64_t items = layer_norm_items(args.shape);
  const std::int64_t most = wanted < items ? wanted : items;
  sums.slice_rows = (args.shape.rows + most - 1) / most;
  ColumnTotalsLaunch totals{args, (args.shape.rows + sums.slice_rows - 1) / sums.slice_rows};
  const Status status = launch(layer_norm_column_sums_kernel<S, O, kFromOutput>, sums,
                               sums.tiles * static_cast<std::uint32_t>(totals.slices), kRowThreads,
                               stream, "launch of layer_norm_column_sums_kernel");
  if (!status.ok()) return status;
  const auto blocks =
      static_cast<std::uint32_t>((args.shape.columns + kRowThreads - 1) / kRowThreads);
  return launch(layer_norm_column_totals_kernel<RowCompute<S>>, totals, blocks, kRowThreads, stream,
                "launch of layer_norm_column_totals_kernel");
}

}  // namespace
}  // namespace cuda

Status layer_norm_backward_cuda(const LayerNormBackwardArgs& args, int multiprocessors,
                                Stream stream) {
  using namespace cuda;
  return dispatch_rows(args.shape, "dtype of layer_norm_backward", [&]<class S, class O>(S, O) {
    const auto run = [&]<bool kFromOutput>(std::bool_constant<kFromOutput>) {
      if (args.grad_input != nullptr) {
        const Status status = launch_grad_input<S, O, kFromOutput>(args, multiprocessors, stream);
        if (!status.ok()) return status;
      }
      if (args.partials == nullptr) return Status{};
      return launch_column_sums<S, O, kFromOutput>(args, multiprocessors, stream);
    };
    return args.from_output ? run(std::true_type{}) : run(std::false_type{});
  });
}

}  // namespace torchfuse::kernels
