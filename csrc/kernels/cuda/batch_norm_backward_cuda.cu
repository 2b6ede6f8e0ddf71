// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/batch_norm_backward.h"

#include "kernels/cuda/batch_norm_backward_kernels.cuh"

namespace torchfuse::kernels {

Status batch_norm_backward_reduce_cuda(const BatchNormBackwardReduceArgs& args,
                                       const BatchNormWorkspace& workspace, Stream stream) {
  using namespace cuda;
  const BatchNormInput grad_residual = dense(args.shape, args.grad_residual);
  return dispatch_batch_norm(
      args.shape, {args.grad_output, args.input, args.output, grad_residual},
      "dtype of batch_norm_backward_reduce",
      [&]<class S, class Layout, bool kWhole>(S, Layout, std::bool_constant<kWhole>) {
        BatchNormBackwardReduceLaunch arguments{};
        arguments.grid = batch_norm_grid(args.shape, args.input, BatchNormPass::kSums,
                                         workspace.multiprocessors * kSumBlocks<Layout>);
        arguments.grad_output = args.grad_output;
        arguments.input = args.input;
        arguments.output = args.output;
        arguments.grad_residual = grad_residual;
        arguments.weight = args.weight;
        arguments.bias = args.bias;
        arguments.grad_weight = args.grad_weight;
        arguments.grad_bias = args.grad_bias;
        arguments.relu = args.relu;
        arguments.saved = args.saved;
        arguments.sums = args.sums;
        arguments.partials = workspace.partials;
        arguments.arrivals = workspace.arrivals;
        return launch_batch_norm(batch_norm_backward_reduce_kernel<S, Layout, kWhole>, arguments,
                                 stream, "launch of batch_norm_backward_reduce_kernel");
      });
}

Status batch_norm_backward_elemt_cuda(const BatchNormBackwardElemtArgs& args,
                                      const BatchNormWorkspace& workspace, Stream stream) {
  using namespace cuda;
  const BatchNormInput grad_input = dense(args.shape, args.grad_input);
  return dispatch_batch_norm(
      args.shape, {args.grad_output, args.input, grad_input}, "dtype of batch_norm_backward_elemt",
      [&]<class S, class Layout, bool kWhole>(S, Layout, std::bool_constant<kWhole>) {
        BatchNormBackwardElemtLaunch arguments{};
        arguments.grad_input = grad_input;
        arguments.grid = batch_norm_grid(args.shape, grad_input, BatchNormPass::kElements,
                                         workspace.multiprocessors * kSumBlocks<Layout>);
        arguments.grad_output = args.grad_output;
        arguments.input = args.input;
        arguments.weight = args.weight;
        arguments.bias = args.bias;
        arguments.relu = args.relu;
        arguments.saved = args.saved;
        arguments.sums = args.sums;
        return launch_batch_norm(batch_norm_backward_elemt_kernel<S, Layout, kWhole>, arguments,
                                 stream, "launch of batch_norm_backward_elemt_kernel");
      });
}

}  // namespace torchfuse::kernels
