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

/// On CUDA, rows of at most this many bytes of input stay in registers. Each block then writes a
/// slice of partial sums. Longer rows have no more slices than items.
constexpr int kLayerNormKeptBytes = 8192;

/// Returns the largest number of slices on CUDA. No device runs 512 of the blocks at once.
constexpr std::int64_t layer_norm_slices_cuda(const LayerNormShape& shape) {
  if (shape.columns * static_cast<std::int64_t>(size_of(shape.input)) > kLayerNormKeptBytes) {
    return layer_norm_items(shape);
  }
  return shape.rows < 512 ? shape.rows : 512;
}
/// Number of partial sums on CUDA.
constexpr std::int64_t layer_norm_partials_cuda(const LayerNormShape& shape) {
  return layer_norm_slices_cuda(shape) * 2 * padded_columns(shape.columns);
}

void layer_norm_backward_terms_cpu(const LayerNormBackwardArgs& args);
/// Computes items [begin, end): rows of the input's gradient, and partial sums.
void layer_norm_backward_cpu(CpuIsa isa, const LayerNormBackwardArgs& args, std::int64_t begin,
                             std::int64_t end);
/// Adds the partial sums of columns [begin, end).
void layer_norm_backward_sum_cpu(const LayerNormBackwardArgs& args, std::int64_t begin,
                                 std::int64_t end);

/// A launch for the rows and, with sums, one or two for these. Does not use args.terms.
Status layer_norm_backward_cuda(const LayerNormBackwardArgs& args, int multiprocessors,
                                Stream stream);

}  // namespace torchfuse::kernels
