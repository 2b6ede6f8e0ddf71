// SPDX-License-Identifier: BSD-3-Clause
// The backward pass of layer_norm.h: the gradient of the input, and those of weight and bias, which
// are sums over the rows.
#pragma once

#include <cstdint>

#include "kernels/layer_norm.h"

namespace torchfuse::kernels {

struct LayerNormBackwardArgs {
  LayerNormShape shape;
  const void* grad_output = nullptr;
  /// The input; or, with `from_output`, the output, from which x_hat is recomputed.
  const void* source = nullptr;
  bool from_output = false;
  ChannelInput weight;
  ChannelInput bias;           ///< read with `from_output` alone
  const void* mean = nullptr;  ///< not read with `from_output` or for RMS normalization
  const void* rstd = nullptr;
  void* grad_input = nullptr;
  ChannelOutput grad_weight;
  ChannelOutput grad_bias;
  void* terms = nullptr;     ///< CPU: room for kLayerNormBackwardTerms rows of padded_columns()
  void* partials = nullptr;  ///< layer_norm_partials(), in the compute type; null: no sums wanted
};

/// Rows whose gradients of weight and bias are summed in the compute type. The sums of all items
/// are added in fp64, in order: the result depends neither on threads nor on instruction levels.
constexpr std::int64_t kLayerNormItemRows = 64;

TORCHFUSE_HOST_DEVICE constexpr std::int64_t layer_norm_items(const LayerNormShape& shape) {
  return (shape.rows + kLayerNormItemRows - 1) / kLayerNormItemRows;
}
/// Numbers in the partial sums: of dy * x_hat and of dy, for every item and column.
TORCHFUSE_HOST_DEVICE constexpr std::int64_t layer_norm_partials(const LayerNormShape& shape) {
  return layer_norm_items(shape) * 2 * padded_columns(shape.columns);
}

void layer_norm_backward_terms_cpu(const LayerNormBackwardArgs& args);
/// Items [begin, end): rows of the gradient of the input, and partial sums.
void layer_norm_backward_cpu(CpuIsa isa, const LayerNormBackwardArgs& args, std::int64_t begin,
                             std::int64_t end);
/// Adds the partial sums of columns [begin, end).
void layer_norm_backward_sum_cpu(const LayerNormBackwardArgs& args, std::int64_t begin,
                                 std::int64_t end);

/// One launch for the gradient of the input, two for the sums; args.terms is not used.
Status layer_norm_backward_cuda(const LayerNormBackwardArgs& args, int multiprocessors,
                                Stream stream);

}  // namespace torchfuse::kernels
