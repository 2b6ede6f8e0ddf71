// SPDX-License-Identifier: BSD-3-Clause
// Batch normalization in two passes, between which statistics can be summed over ranks: local
// statistics, and then the output. Backward passes: batch_norm_backward.h.
#pragma once

#include <cstdint>

#include "kernels/common/channel_vector.h"
#include "kernels/common/dtype.h"
#include "kernels/common/status.h"
#include "kernels/common/stream.h"
#include "kernels/cpu/isa.h"
#include "kernels/functors/batch_norm.h"

namespace torchfuse::kernels {

/// Channels first: `outer` samples, and per sample and channel `inner` contiguous elements.
/// Channels last: `outer` rows of `channels` contiguous elements, with inner 1.
struct BatchNormShape {
  std::int64_t outer = 0;
  std::int64_t channels = 0;
  std::int64_t inner = 1;
  bool channels_last = false;
  DType dtype = DType::kFloat32;  ///< shared by input, residual, output and gradients

  constexpr std::int64_t numel() const { return outer * channels * inner; }
};

/// A tensor that kernels read. Strides are in elements; channels last has a channel stride of 1.
/// Output tensors are dense: outer stride channels * inner, channel stride inner.
struct BatchNormInput {
  const void* data = nullptr;  ///< null if absent
  std::int64_t outer_stride = 0;
  std::int64_t channel_stride = 0;
};

struct BatchNormStatsArgs {
  BatchNormShape shape;
  BatchNormInput input;
  double* packed = nullptr;    ///< packed_moments_size(channels), all written
  double* partials = nullptr;  ///< CPU: batch_norm_partial_rows() * channels * kStatsPartial
};

/// Computes `saved` and the running statistics from reduced moments, before the first output.
struct BatchNormFinishArgs {
  std::int64_t channels = 0;
  const double* packed = nullptr;  ///< null: use and keep the running statistics
  ChannelOutput running_mean;
  ChannelOutput running_var;
  std::int64_t* num_batches_tracked = nullptr;
  double momentum = 0.1;
  bool cumulative = false;  ///< use 1 / num_batches_tracked as momentum
  double eps = 1e-5;
  double* saved = nullptr;  ///< 2 * channels + 1: mean, invstd, count (0 for running statistics)
};

/// Rows of `channels` numbers in the terms. Terms have the compute type: fp64 for fp64, otherwise
/// fp32.
constexpr std::int64_t kNormalizeTerms = 3;
/// Doubles that one work item writes per channel.
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

/// On the CPU, sums are split into items. An item's result depends neither on the computing thread
/// nor on the instruction level. Each item writes its channels' partial sums to a row of
/// `partials`. The rows are then added in order.
std::int64_t batch_norm_items(const BatchNormShape& shape);
std::int64_t batch_norm_partial_rows(const BatchNormShape& shape);

/// Computes items [begin, end) of the statistics.
void batch_norm_stats_cpu(CpuIsa isa, const BatchNormStatsArgs& args, std::int64_t begin,
                          std::int64_t end);
/// Adds the rows of channels [begin, end); the range with channel 0 also writes the count.
void batch_norm_pack_cpu(const BatchNormStatsArgs& args, std::int64_t begin, std::int64_t end);
/// Writes the running statistics and `saved`.
void batch_norm_finish_cpu(const BatchNormFinishArgs& args);
/// Fills args.terms. Call once before the elements.
void batch_norm_elemt_terms_cpu(const BatchNormElemtArgs& args);
/// Computes elements [begin, end), numbered in the output's memory order. Channels last: computes
/// the rows that begin in this range.
void batch_norm_elemt_cpu(CpuIsa isa, const BatchNormElemtArgs& args, std::int64_t begin,
                          std::int64_t end);

/// Device memory that the CUDA kernels divide among their blocks.
struct BatchNormWorkspace {
  double* partials = nullptr;         ///< batch_norm_workspace_partials(), uninitialized
  std::uint32_t* arrivals = nullptr;  ///< batch_norm_workspace_arrivals(), zero before and after
  int multiprocessors = 1;            ///< the device's number of multiprocessors
};

/// Workspace sizes, in doubles and counters, that suffice for every launch on input with this
/// shape.
constexpr std::int64_t batch_norm_workspace_partials(const BatchNormShape& shape,
                                                     int multiprocessors) {
  constexpr std::int64_t kFields = 4;
  constexpr std::int64_t kBlockChannels = 32;
  constexpr std::int64_t kBlocksPerMultiprocessor = 12;  // three waves of four
  const std::int64_t in_blocks = kBlockChannels * kBlocksPerMultiprocessor * multiprocessors;
  return kFields * (shape.channels < in_blocks ? in_blocks : shape.channels);
}
constexpr std::int64_t batch_norm_workspace_arrivals(const BatchNormShape& shape) {
  return shape.channels < 1 ? 1 : shape.channels;
}

/// One launch. Uses both parts of the workspace.
Status batch_norm_stats_cuda(const BatchNormStatsArgs& args, const BatchNormWorkspace& workspace,
                             Stream stream);
/// One launch for batch_norm_finish_cpu and batch_norm_elemt_cpu. Writes `finish.saved` and the
/// running statistics, even without elements, and the output. Does not use args.saved and
/// args.terms. Uses workspace.arrivals.
Status batch_norm_elemt_cuda(const BatchNormElemtArgs& args, const BatchNormFinishArgs& finish,
                             const BatchNormWorkspace& workspace, Stream stream);

}  // namespace torchfuse::kernels
