// SPDX-License-Identifier: BSD-3-Clause
// Backward passes for batch_norm.h: local gradient sums, and then the input's gradient.
#pragma once

#include <cstdint>

#include "kernels/batch_norm.h"

namespace torchfuse::kernels {

/// Like kNormalizeTerms and kStatsPartial.
constexpr std::int64_t kGradInputTerms = 3;
constexpr std::int64_t kGradPartial = 2;

/// With `relu`, the gradient passes where output > 0. Without `output`, the output is recomputed
/// from the input.
struct BatchNormBackwardReduceArgs {
  BatchNormShape shape;
  BatchNormInput grad_output;
  BatchNormInput input;
  BatchNormInput output;
  ChannelInput weight;
  ChannelInput bias;
  bool relu = false;
  const double* saved = nullptr;
  double* sums = nullptr;  ///< 2 * channels: this rank's sums of dy and dy * x_hat
  ChannelOutput grad_weight;
  ChannelOutput grad_bias;
  void* grad_residual = nullptr;  ///< gradient behind the ReLU; null if not wanted
  double* partials = nullptr;     ///< CPU: batch_norm_partial_rows() * channels * kGradPartial
  void* terms = nullptr;          ///< CPU: room for kNormalizeTerms rows
};

/// `grad_output` is the output's gradient, or the gradient behind the ReLU (then `relu` is false).
struct BatchNormBackwardElemtArgs {
  BatchNormShape shape;
  BatchNormInput grad_output;
  BatchNormInput input;
  ChannelInput weight;
  ChannelInput bias;
  bool relu = false;  ///< recompute the ReLU's gate from the input
  const double* saved = nullptr;
  const double* sums = nullptr;  ///< sums over all ranks
  void* grad_input = nullptr;
  void* terms = nullptr;  ///< CPU: room for kNormalizeTerms + kGradInputTerms rows
};

void batch_norm_backward_reduce_terms_cpu(const BatchNormBackwardReduceArgs& args);
/// Computes items [begin, end) of the gradient sums, and grad_residual's elements if wanted.
void batch_norm_backward_reduce_cpu(CpuIsa isa, const BatchNormBackwardReduceArgs& args,
                                    std::int64_t begin, std::int64_t end);
/// Adds the rows of channels [begin, end), and writes the weight's and bias's gradients.
void batch_norm_backward_sum_cpu(const BatchNormBackwardReduceArgs& args, std::int64_t begin,
                                 std::int64_t end);
void batch_norm_backward_elemt_terms_cpu(const BatchNormBackwardElemtArgs& args);
/// Like batch_norm_elemt_cpu.
void batch_norm_backward_elemt_cpu(CpuIsa isa, const BatchNormBackwardElemtArgs& args,
                                   std::int64_t begin, std::int64_t end);

/// One launch. Uses both parts of the workspace. Does not use args.terms and args.partials.
Status batch_norm_backward_reduce_cuda(const BatchNormBackwardReduceArgs& args,
                                       const BatchNormWorkspace& workspace, Stream stream);
/// One launch. Uses only workspace.multiprocessors. Does not use args.terms.
Status batch_norm_backward_elemt_cuda(const BatchNormBackwardElemtArgs& args,
                                      const BatchNormWorkspace& workspace, Stream stream);

}  // namespace torchfuse::kernels
