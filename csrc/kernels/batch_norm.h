// SPDX-License-Identifier: BSD-3-Clause
// Batch normalization in two passes with room for a sum over ranks between them: local statistics,
// then the output. Backwards: batch_norm_backward.h.
#pragma once

#include <cstdint>

#include "kernels/common/channel_vector.h"
#include "kernels/common/dtype.h"
#include "kernels/common/status.h"
#include "kernels/common/stream.h"
#include "kernels/cpu/isa.h"
#include "kernels/functors/batch_norm.h"

namespace torchfuse::kernels {

/// Channels first: `inner` contiguous elements of each channel of each of `outer` samples. Channels
/// last: `outer` rows of `channels` contiguous elements, and inner is 1.
struct BatchNormShape {
  std::int64_t outer = 0;
  std::int64_t channels = 0;
  std::int64_t inner = 1;
  bool channels_last = false;
  DType dtype = DType::kFloat32;  ///< of input, residual, output and their gradients

  constexpr std::int64_t numel() const { return outer * channels * inner; }
};

/// A tensor that is read. Strides in elements; channels last has a channel stride of 1. Tensors
/// that are written are dense: outer stride channels * inner, channel stride inner.
struct BatchNormInput {
  const void* data = nullptr;  ///< null: not there
  std::int64_t outer_stride = 0;
  std::int64_t channel_stride = 0;
};

struct BatchNormStatsArgs {
  BatchNormShape shape;
  BatchNormInput input;
  double* packed = nullptr;    ///< packed_moments_size(channels); all written
  double* partials = nullptr;  ///< CPU: batch_norm_partial_rows() * channels * kStatsPartial
};

/// What becomes of the reduced moments before the first output.
struct BatchNormFinishArgs {
  std::int64_t channels = 0;
  const double* packed = nullptr;  ///< null: the running statistics are used, and not changed
  ChannelOutput running_mean;
  ChannelOutput running_var;
  std::int64_t* num_batches_tracked = nullptr;
  double momentum = 0.1;
  bool cumulative = false;  ///< the factor is 1 / num_batches_tracked instead of momentum
  double eps = 1e-5;
  double* saved = nullptr;  ///< 2 * channels + 1: mean, invstd, count (0 for running statistics)
};

/// Terms of all channels in the compute type, fp64 for fp64 and fp32 otherwise: kNormalizeTerms
/// rows of `channels` numbers.
constexpr std::int64_t kNormalizeTerms = 3;
/// Doubles that one item of work leaves for each of its channels.
constexpr std::int64_t kStatsPartial = 3;

/// y = x_hat * weight + bias, plus residual, then ReLU.
struct BatchNormElemtArgs {
  BatchNormShape shape;
  BatchNormInput input;
  BatchNormInput residual;
  ChannelInput weight;
  ChannelInput bias;
  bool relu = false;
  const double* saved = nullptr;
  void* output = nullptr;
  void* terms = nullptr;  ///< CPU: room for kNormalizeTerms rows
};

/// On the CPU sums are cut into items, whose results depend neither on the thread that computes
/// them nor on the instruction level. Each item writes the partial sums of its channels into a row
/// of `partials`; the rows are added in order.
std::int64_t batch_norm_items(const BatchNormShape& shape);
std::int64_t batch_norm_partial_rows(const BatchNormShape& shape);

/// Items [begin, end) of the statistics.
void batch_norm_stats_cpu(CpuIsa isa, const BatchNormStatsArgs& args, std::int64_t begin,
                          std::int64_t end);
/// Adds the rows of channels [begin, end); the range with channel 0 also writes the count.
void batch_norm_pack_cpu(const BatchNormStatsArgs& args, std::int64_t begin, std::int64_t end);
/// Running statistics and `saved`.
void batch_norm_finish_cpu(const BatchNormFinishArgs& args);
/// Fills args.terms; once before the elements.
void batch_norm_elemt_terms_cpu(const BatchNormElemtArgs& args);
/// Elements [begin, end), counted in the order of the output's memory. Channels last: the rows that
/// begin there.
void batch_norm_elemt_cpu(CpuIsa isa, const BatchNormElemtArgs& args, std::int64_t begin,
                          std::int64_t end);

/// Device memory that the CUDA kernels share out among their blocks.
struct BatchNormWorkspace {
  double* partials = nullptr;         ///< batch_norm_workspace_partials(); need not be initialized
  std::uint32_t* arrivals = nullptr;  ///< batch_norm_workspace_arrivals(); zero before and after
  int multiprocessors = 1;            ///< of the device
};

/// Doubles and counters that are enough for every launch on input of this shape.
constexpr std::int64_t batch_norm_workspace_partials(const BatchNormShape& shape,
                                                     int multiprocessors) {
  constexpr std::int64_t kFields = 4;
  constexpr std::int64_t kBlockChannels = 32;
  constexpr std::int64_t kBlocksPerMultiprocessor = 4;
  const std::int64_t in_blocks = kBlockChannels * kBlocksPerMultiprocessor * multiprocessors;
  return kFields * (shape.channels < in_blocks ? in_blocks : shape.channels);
}
constexpr std::int64_t batch_norm_workspace_arrivals(const BatchNormShape& shape) {
  return shape.channels < 1 ? 1 : shape.channels;
}

/// One launch. Uses both parts of the workspace.
Status batch_norm_stats_cuda(const BatchNormStatsArgs& args, const BatchNormWorkspace& workspace,
                             Stream stream);
/// One launch for batch_norm_finish_cpu and batch_norm_elemt_cpu: writes `finish.saved` and the
/// running statistics, even without elements, and the output; args.saved and args.terms are not
/// used. Uses workspace.arrivals.
Status batch_norm_elemt_cuda(const BatchNormElemtArgs& args, const BatchNormFinishArgs& finish,
                             const BatchNormWorkspace& workspace, Stream stream);

}  // namespace torchfuse::kernels
