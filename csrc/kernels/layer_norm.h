// SPDX-License-Identifier: BSD-3-Clause
// Layer and RMS normalization of rows. Backward pass: layer_norm_backward.h.
#pragma once

#include <cstdint>

#include "kernels/common/channel_vector.h"
#include "kernels/common/dtype.h"
#include "kernels/common/macros.h"
#include "kernels/common/status.h"
#include "kernels/common/stream.h"
#include "kernels/cpu/isa.h"
#include "kernels/functors/layer_norm.h"

namespace torchfuse::kernels {

/// `rows` consecutive rows of `columns` contiguous elements.
struct LayerNormShape {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  bool rms = false;                ///< RMS normalization: the mean is not subtracted
  DType input = DType::kFloat32;   ///< type of input and input gradient
  DType output = DType::kFloat32;  ///< the input's type, or fp32 for 16-bit input
};

/// Statistics have the compute type: fp64 for fp64, otherwise fp32. On CUDA, weight and bias have
/// the input's type, or fp32 for 16-bit input. On the CPU, any type is possible.
struct LayerNormArgs {
  LayerNormShape shape;
  const void* input = nullptr;
  ChannelInput weight;
  ChannelInput bias;
  double eps = 1e-5;
  void* output = nullptr;
  void* mean = nullptr;   ///< per row; not written for RMS normalization
  void* rstd = nullptr;   ///< per row
  void* terms = nullptr;  ///< CPU: room for kLayerNormTerms rows of padded_columns()
};

/// Rows of terms in the compute type: weight and bias, and in the backward pass also 1 / weight.
constexpr std::int64_t kLayerNormTerms = 2;
constexpr std::int64_t kLayerNormBackwardTerms = 3;

/// Columns in terms and partial sums, padded to full vectors at every instruction level.
TORCHFUSE_HOST_DEVICE constexpr std::int64_t padded_columns(std::int64_t columns) {
  return (columns + 15) / 16 * 16;
}

/// Fills args.terms. Call once before the rows.
void layer_norm_terms_cpu(const LayerNormArgs& args);
/// Computes rows [begin, end).
void layer_norm_cpu(CpuIsa isa, const LayerNormArgs& args, std::int64_t begin, std::int64_t end);

/// One launch. Does not use args.terms.
Status layer_norm_cuda(const LayerNormArgs& args, int multiprocessors, Stream stream);

}  // namespace torchfuse::kernels
