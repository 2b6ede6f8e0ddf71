// SPDX-License-Identifier: BSD-3-Clause
// Softmax cross entropy over rows of logits, and the logits' gradient, without a copy of the
// logits.
#pragma once

#include <cstdint>

#include "kernels/common/channel_vector.h"
#include "kernels/common/dtype.h"
#include "kernels/common/status.h"
#include "kernels/common/stream.h"
#include "kernels/cpu/isa.h"
#include "kernels/functors/softmax_cross_entropy.h"

namespace torchfuse::kernels {

/// `rows` consecutive rows of `classes` contiguous logits.
struct CrossEntropyShape {
  std::int64_t rows = 0;
  std::int64_t classes = 0;
  DType logits = DType::kFloat32;  ///< type of logits and gradient
};

/// Rows whose label is `ignored` have a loss and a gradient of 0. Rows with any other label outside
/// [0, classes) have NaN.
struct CrossEntropyLabels {
  const std::int64_t* labels = nullptr;
  bool ignores = false;
  std::int64_t ignored = 0;

  TORCHFUSE_HOST_DEVICE bool is_ignored(std::int64_t row) const {
    return ignores && labels[row] == ignored;
  }
};

struct CrossEntropyArgs {
  CrossEntropyShape shape;
  const void* logits = nullptr;
  CrossEntropyLabels labels;
  double smoothing = 0.0;
  ChannelOutput losses;         ///< one per row
  void* log_sum_exp = nullptr;  ///< one per row, in the compute type: fp64 for fp64, else fp32
  void* rest = nullptr;         ///< rounding error of log_sum_exp, in the same type
};

struct CrossEntropyBackwardArgs {
  CrossEntropyShape shape;
  const void* logits = nullptr;
  CrossEntropyLabels labels;
  double smoothing = 0.0;
  ChannelInput grad_losses;
  const void* log_sum_exp = nullptr;
  const void* rest = nullptr;   ///< null: zeros
  void* grad_logits = nullptr;  ///< may be the logits
};

/// Computes rows [begin, end).
void softmax_cross_entropy_cpu(CpuIsa isa, const CrossEntropyArgs& args, std::int64_t begin,
                               std::int64_t end);
void softmax_cross_entropy_backward_cpu(CpuIsa isa, const CrossEntropyBackwardArgs& args,
                                        std::int64_t begin, std::int64_t end);

/// One launch each.
Status softmax_cross_entropy_cuda(const CrossEntropyArgs& args, int multiprocessors, Stream stream);
Status softmax_cross_entropy_backward_cuda(const CrossEntropyBackwardArgs& args,
                                           int multiprocessors, Stream stream);

}  // namespace torchfuse::kernels
