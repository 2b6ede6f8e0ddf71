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

#define TORCHFUSE_DECLARE(level, enumerator, Result, function, Args) \
  namespace cpu::level {                                             \
  Result function(const Args&, std::int64_t, std::int64_t);          \
  }
#define TORCHFUSE_CALL(level, enumerator, function) \
  case CpuIsa::enumerator:                          \
    return cpu::level::function(args, begin, end);
/// Defines `entry`, which calls `function` of instruction level `isa`.
#define TORCHFUSE_DISPATCH(Result, entry, function, Args)                            \
  TORCHFUSE_FOR_EACH_LEVEL(TORCHFUSE_DECLARE, Result, function, Args)                \
  Result entry(CpuIsa isa, const Args& args, std::int64_t begin, std::int64_t end) { \
    switch (entered(isa)) { TORCHFUSE_FOR_EACH_LEVEL(TORCHFUSE_CALL, function) }     \
    return cpu::baseline::function(args, begin, end);                                \
  }

TORCHFUSE_DISPATCH(void, multi_tensor_l2_norm_cpu, multi_tensor_l2_norm, L2NormArgs)
TORCHFUSE_DISPATCH(bool, multi_tensor_unscale_cpu, multi_tensor_unscale, UnscaleArgs)
TORCHFUSE_DISPATCH(void, batch_norm_stats_cpu, batch_norm_stats, BatchNormStatsArgs)
TORCHFUSE_DISPATCH(void, batch_norm_elemt_cpu, batch_norm_elemt, BatchNormElemtArgs)
TORCHFUSE_DISPATCH(void, batch_norm_backward_reduce_cpu, batch_norm_backward_reduce,
                   BatchNormBackwardReduceArgs)
TORCHFUSE_DISPATCH(void, batch_norm_backward_elemt_cpu, batch_norm_backward_elemt,
                   BatchNormBackwardElemtArgs)
TORCHFUSE_DISPATCH(void, layer_norm_cpu, layer_norm, LayerNormArgs)
TORCHFUSE_DISPATCH(void, layer_norm_backward_cpu, layer_norm_backward, LayerNormBackwardArgs)
TORCHFUSE_DISPATCH(void, softmax_cross_entropy_cpu, softmax_cross_entropy, CrossEntropyArgs)
TORCHFUSE_DISPATCH(void, softmax_cross_entropy_backward_cpu, softmax_cross_entropy_backward,
                   CrossEntropyBackwardArgs)

}  // namespace torchfuse::kernels
