// SPDX-License-Identifier: BSD-3-Clause
// Backward pass for layer_norm.h: the input's gradient, and the gradients of weight and bias, which
// are sums over the rows.
#pragma once

#include <cstdint>

#include "kernels/layer_norm.h"

namespace torchfuse::kernels {

struct LayerNormBackwardArgs {
  LayerNormShape shape;
  const void* grad_output = nullptr;
  /// The input. With `from_output`, the output, from which x_hat is recomputed.
  const void* source = nullptr;
  bool from_output = false;
  ChannelInput weight;
  ChannelInput bias;           ///< only read with `from_output`
  const void* mean = nullptr;  ///< not read with `from_output` or for RMS normalization
  const void* rstd = nullptr;
  void* grad_input = nullptr;
  ChannelOutput grad_weight;
  ChannelOutput grad_bias;
  void* terms = nullptr;     ///< CPU: room for kLayerNormBackwardTerms rows of padded_columns()
  void* partials = nullptr;  ///< layer_norm_partials(), in the compute type; null: no sums
};

/// Rows per item. An item sums the gradients of weight and bias in the compute type. The items'
/// sums are added in fp64, in order, so the result depends neither on threads nor on instruction
/// levels.
constexpr std::int64_t kLayerNormItemRows = 64;

TORCHFUSE_HOST_DEVICE constexpr std::int64_t layer_norm_items(const LayerNormShape& shape) {
  return (shape.rows + kLayerNormItemRows - 1) / kLayerNormItemRows;
}
/// Number of partial sums: dy * x_hat and dy, for every item and column.
TORCHFUSE_HOST_DEVICE constexpr std::int64_t layer_norm_partials(const LayerNormShape& shape) {
  return layer_norm_items(shape) * 2 * padded_columns(shape.columns);
}

void layer_norm_backward_terms_cpu(const LayerNormBackwardArgs& args);
/// Computes items [begin, end): rows of the input's gradient, and partial sums.
void layer_norm_backward_cpu(CpuIsa isa, const LayerNormBackwardArgs& args, std::int64_t begin,
                             std::int64_t end);
/// Adds the partial sums of columns [begin, end).
void layer_norm_backward_sum_cpu(const LayerNormBackwardArgs& args, std::int64_t begin,
                                 std::int64_t end);

/// One launch for the input's gradient, two for the sums. Does not use args.terms.
Status layer_norm_backward_cuda(const LayerNormBackwardArgs& args, int multiprocessors,
                                Stream stream);

}  // namespace torchfuse::kernels
