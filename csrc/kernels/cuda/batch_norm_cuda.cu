// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/batch_norm.h"

#include "kernels/cuda/batch_norm_kernels.cuh"

namespace torchfuse::kernels {

Status batch_norm_stats_cuda(const BatchNormStatsArgs& args, const BatchNormWorkspace& workspace,
                             Stream stream) {
  using namespace cuda;
  return dispatch_batch_norm(
      args.shape, {args.input}, "dtype of batch_norm_stats",
      [&]<class S, class Layout, bool kWhole>(S, Layout, std::bool_constant<kWhole>) {
        BatchNormStatsLaunch arguments{};
        arguments.grid = batch_norm_grid(args.shape, args.input, BatchNormPass::kSums,
                                         workspace.multiprocessors * kSumBlocks<Layout>);
        arguments.input = args.input;
        arguments.count = static_cast<double>(args.shape.outer * args.shape.inner);
        arguments.packed = args.packed;
        arguments.partials = workspace.partials;
        arguments.arrivals = workspace.arrivals;
        return launch_batch_norm(batch_norm_stats_kernel<S, Layout, kWhole>, arguments, stream,
                                 "launch of batch_norm_stats_kernel");
      });
}

Status batch_norm_elemt_cuda(const BatchNormElemtArgs& args, const BatchNormFinishArgs& finish,
                             const BatchNormWorkspace& workspace, Stream stream) {
  using namespace cuda;
  const BatchNormInput output = dense(args.shape, args.output);
  return dispatch_batch_norm(
      args.shape, {args.input, args.residual, output}, "dtype of batch_norm_elemt",
      [&]<class S, class Layout, bool kWhole>(S, Layout, std::bool_constant<kWhole>) {
        BatchNormElemtLaunch arguments{};
        arguments.output = output;
        arguments.grid = batch_norm_grid(args.shape, output, BatchNormPass::kElements,
                                         workspace.multiprocessors * kElementBlocks);
        arguments.input = args.input;
        arguments.residual = args.residual;
        arguments.weight = args.weight;
        arguments.bias = args.bias;
        arguments.relu = args.relu;
        arguments.finish = finish;
        arguments.arrivals = workspace.arrivals;
        return launch_batch_norm(batch_norm_elemt_kernel<S, Layout, kWhole>, arguments, stream,
                                 "launch of batch_norm_elemt_kernel");
      });
}

}  // namespace torchfuse::kernels
