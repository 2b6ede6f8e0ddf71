// SPDX-License-Identifier: BSD-3-Clause
// Chooses the instruction level of the ops that are not templates.
#include "kernels/batch_norm.h"
#include "kernels/batch_norm_backward.h"
#include "kernels/layer_norm.h"
#include "kernels/layer_norm_backward.h"
#include "kernels/multi_tensor_l2_norm.h"
#include "kernels/multi_tensor_unscale.h"
#include "kernels/softmax_cross_entropy.h"

namespace torchfuse::kernels {

#define TORCHFUSE_DECLARE_LEVEL(level, enumerator, ...)                                            \
  namespace cpu::level {                                                                           \
  void multi_tensor_l2_norm(const L2NormArgs&, std::int64_t, std::int64_t);                        \
  bool multi_tensor_unscale(const UnscaleArgs&, std::int64_t, std::int64_t);                       \
  void batch_norm_stats(const BatchNormStatsArgs&, std::int64_t, std::int64_t);                    \
  void batch_norm_elemt(const BatchNormElemtArgs&, std::int64_t, std::int64_t);                    \
  void batch_norm_backward_reduce(const BatchNormBackwardReduceArgs&, std::int64_t, std::int64_t); \
  void batch_norm_backward_elemt(const BatchNormBackwardElemtArgs&, std::int64_t, std::int64_t);   \
  void layer_norm(const LayerNormArgs&, std::int64_t, std::int64_t);                               \
  void layer_norm_backward(const LayerNormBackwardArgs&, std::int64_t, std::int64_t);              \
  void softmax_cross_entropy(const CrossEntropyArgs&, std::int64_t, std::int64_t);                 \
  void softmax_cross_entropy_backward(const CrossEntropyBackwardArgs&, std::int64_t,               \
                                      std::int64_t);                                               \
  }
TORCHFUSE_FOR_EACH_LEVEL(TORCHFUSE_DECLARE_LEVEL)
#undef TORCHFUSE_DECLARE_LEVEL

/// Calls function(args, begin, end) at instruction level `isa`.
#define TORCHFUSE_CALL_LEVEL_CASE(level, enumerator, function) \
  case CpuIsa::enumerator:                                     \
    return cpu::level::function(args, begin, end);
#define TORCHFUSE_CALL_LEVEL(isa, function)                                      \
  switch (isa) { TORCHFUSE_FOR_EACH_LEVEL(TORCHFUSE_CALL_LEVEL_CASE, function) } \
  return cpu::baseline::function(args, begin, end)

void multi_tensor_l2_norm_cpu(CpuIsa isa, const L2NormArgs& args, std::int64_t begin,
                              std::int64_t end) {
  TORCHFUSE_CALL_LEVEL(isa, multi_tensor_l2_norm);
}

bool multi_tensor_unscale_cpu(CpuIsa isa, const UnscaleArgs& args, std::int64_t begin,
                              std::int64_t end) {
  TORCHFUSE_CALL_LEVEL(isa, multi_tensor_unscale);
}

void batch_norm_stats_cpu(CpuIsa isa, const BatchNormStatsArgs& args, std::int64_t begin,
                          std::int64_t end) {
  TORCHFUSE_CALL_LEVEL(isa, batch_norm_stats);
}

void batch_norm_elemt_cpu(CpuIsa isa, const BatchNormElemtArgs& args, std::int64_t begin,
                          std::int64_t end) {
  TORCHFUSE_CALL_LEVEL(isa, batch_norm_elemt);
}

void batch_norm_backward_reduce_cpu(CpuIsa isa, const BatchNormBackwardReduceArgs& args,
                                    std::int64_t begin, std::int64_t end) {
  TORCHFUSE_CALL_LEVEL(isa, batch_norm_backward_reduce);
}

void batch_norm_backward_elemt_cpu(CpuIsa isa, const BatchNormBackwardElemtArgs& args,
                                   std::int64_t begin, std::int64_t end) {
  TORCHFUSE_CALL_LEVEL(isa, batch_norm_backward_elemt);
}

void layer_norm_cpu(CpuIsa isa, const LayerNormArgs& args, std::int64_t begin, std::int64_t end) {
  TORCHFUSE_CALL_LEVEL(isa, layer_norm);
}

void layer_norm_backward_cpu(CpuIsa isa, const LayerNormBackwardArgs& args, std::int64_t begin,
                             std::int64_t end) {
  TORCHFUSE_CALL_LEVEL(isa, layer_norm_backward);
}

void softmax_cross_entropy_cpu(CpuIsa isa, const CrossEntropyArgs& args, std::int64_t begin,
                               std::int64_t end) {
  TORCHFUSE_CALL_LEVEL(isa, softmax_cross_entropy);
}

void softmax_cross_entropy_backward_cpu(CpuIsa isa, const CrossEntropyBackwardArgs& args,
                                        std::int64_t begin, std::int64_t end) {
  TORCHFUSE_CALL_LEVEL(isa, softmax_cross_entropy_backward);
}

#undef TORCHFUSE_CALL_LEVEL
#undef TORCHFUSE_CALL_LEVEL_CASE

}  // namespace torchfuse::kernels
