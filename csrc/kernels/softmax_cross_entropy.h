// SPDX-License-Identifier: BSD-3-Clause
// Cross entropy of softmax over rows of logits, and its gradient, without a copy of the logits.
#pragma once

#include <cstdint>

#include "kernels/common/channel_vector.h"
#include "kernels/common/dtype.h"
#include "kernels/common/status.h"
#include "kernels/common/stream.h"
#include "kernels/cpu/isa.h"
#include "kernels/functors/softmax_cross_entropy.h"

namespace torchfuse::kernels {

/// `rows` rows of `classes` contiguous logits each, one row behind the other.
struct CrossEntropyShape {
  std::int64_t rows = 0;
  std::int64_t classes = 0;
  DType logits = DType::kFloat32;  ///< of the logits and their gradient
};

/// Rows whose label is `ignored` have a loss and a gradient of 0; those of other labels outside of
/// [0, classes) are NaN.
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
  ChannelOutput losses;         ///< of each row
  void* log_sum_exp = nullptr;  ///< of each row, in the compute type: fp64 for fp64, else fp32
  void* rest = nullptr;         ///< what rounding took from it, in the same type
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

/// Rows [begin, end).
void softmax_cross_entropy_cpu(CpuIsa isa, const CrossEntropyArgs& args, std::int64_t begin,
                               std::int64_t end);
void softmax_cross_entropy_backward_cpu(CpuIsa isa, const CrossEntropyBackwardArgs& args,
                                        std::int64_t begin, std::int64_t end);

/// One launch each.
Status softmax_cross_entropy_cuda(const CrossEntropyArgs& args, int multiprocessors, Stream stream);
Status softmax_cross_entropy_backward_cuda(const CrossEntropyBackwardArgs& args,
                                           int multiprocessors, Stream stream);

}  // namespace torchfuse::kernels
