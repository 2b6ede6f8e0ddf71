// SPDX-License-Identifier: BSD-3-Clause
// The backward passes of batch_norm.h: local gradient sums, then the input's gradient.
#pragma once

#include <cstdint>

#include "kernels/batch_norm.h"

namespace torchfuse::kernels {

/// As kNormalizeTerms and kStatsPartial.
constexpr std::int64_t kGradInputTerms = 3;
constexpr std::int64_t kGradPartial = 2;

/// Where a ReLU let the gradient pass: output > 0 where `output` is given, otherwise computed again
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
  double* sums = nullptr;  ///< 2 * channels: dy, dy * x_hat; of this rank
  ChannelOutput grad_weight;
  ChannelOutput grad_bias;
  void* grad_residual = nullptr;  ///< the gradient behind the ReLU; null: not wanted
  double* partials = nullptr;     ///< CPU: batch_norm_partial_rows() * channels * kGradPartial
  void* terms = nullptr;          ///< CPU: room for kNormalizeTerms rows
};

/// `grad` is the gradient of the output, or behind the ReLU (relu is false then).
struct BatchNormBackwardElemtArgs {
  BatchNormShape shape;
  BatchNormInput grad_output;
  BatchNormInput input;
  ChannelInput weight;
  ChannelInput bias;
  bool relu = false;  ///< computed again from the input
  const double* saved = nullptr;
  const double* sums = nullptr;  ///< of all ranks
  void* grad_input = nullptr;
  void* terms = nullptr;  ///< CPU: room for kNormalizeTerms + kGradInputTerms rows
};

void batch_norm_backward_reduce_terms_cpu(const BatchNormBackwardReduceArgs& args);
/// Items [begin, end) of the gradient sums; with grad_residual also its elements.
void batch_norm_backward_reduce_cpu(CpuIsa isa, const BatchNormBackwardReduceArgs& args,
                                    std::int64_t begin, std::int64_t end);
/// Adds the rows of channels [begin, end), and writes the gradients of weight and bias.
void batch_norm_backward_sum_cpu(const BatchNormBackwardReduceArgs& args, std::int64_t begin,
                                 std::int64_t end);
void batch_norm_backward_elemt_terms_cpu(const BatchNormBackwardElemtArgs& args);
/// As batch_norm_elemt_cpu.
void batch_norm_backward_elemt_cpu(CpuIsa isa, const BatchNormBackwardElemtArgs& args,
                                   std::int64_t begin, std::int64_t end);

/// One launch. Uses both parts of the workspace; args.terms and args.partials are not used.
Status batch_norm_backward_reduce_cuda(const BatchNormBackwardReduceArgs& args,
                                       const BatchNormWorkspace& workspace, Stream stream);
/// One launch. Uses workspace.multiprocessors alone; args.terms is not used.
Status batch_norm_backward_elemt_cuda(const BatchNormBackwardElemtArgs& args,
                                      const BatchNormWorkspace& workspace, Stream stream);

}  // namespace torchfuse::kernels
