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
  void* terms = nullptr;  ///< CPU: room for kLayerNormBackwardTerms rows of padded_columns()
  /// layer_norm_partials() or layer_norm_partials_cuda(), in the compute type; null: no sums.
  void* partials = nullptr;
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

/// Slices of rows on CUDA, at most: a block of every kernel that keeps its rows in registers. Rows
/// of more columns have no more slices than items.
constexpr std::int64_t kLayerNormSlices = 512;
constexpr std::int64_t kLayerNormSliceColumns = 4096;

/// Number of partial sums on CUDA.
constexpr std::int64_t layer_norm_partials_cuda(const LayerNormShape& shape) {
  const std::int64_t most = shape.columns <= kLayerNormSliceColumns ? shape.rows : 0;
  const std::int64_t kept = most < kLayerNormSlices ? most : kLayerNormSlices;
  const std::int64_t items = layer_norm_items(shape);
  return (kept > items ? kept : items) * 2 * padded_columns(shape.columns);
}

void layer_norm_backward_terms_cpu(const LayerNormBackwardArgs& args);
/// Computes items [begin, end): rows of the input's gradient, and partial sums.
void layer_norm_backward_cpu(CpuIsa isa, const LayerNormBackwardArgs& args, std::int64_t begin,
                             std::int64_t end);
/// Adds the partial sums of columns [begin, end).
void layer_norm_backward_sum_cpu(const LayerNormBackwardArgs& args, std::int64_t begin,
                                 std::int64_t end);

/// Two launches, or three for long rows; one without sums. Does not use args.terms.
Status layer_norm_backward_cuda(const LayerNormBackwardArgs& args, int multiprocessors,
                                Stream stream);

}  // namespace torchfuse::kernels
