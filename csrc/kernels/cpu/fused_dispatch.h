// SPDX-License-Identifier: BSD-3-Clause
// Runs any functor's phases on the CPU, in the objects of the instruction levels.
#pragma once

#include "kernels/layerwise_optimizer.h"

namespace torchfuse::kernels {

#define TORCHFUSE_DECLARE_LEVEL(level, enumerator, ...)                        \
  namespace cpu::level {                                                       \
  template <class Functor>                                                     \
  void fused_update(const UpdateArgs<Functor>&, std::int64_t, std::int64_t);   \
  template <class Functor>                                                     \
  void fused_measure(const MeasureArgs<Functor>&, std::int64_t, std::int64_t); \
  }
TORCHFUSE_FOR_EACH_LEVEL(TORCHFUSE_DECLARE_LEVEL)
#undef TORCHFUSE_DECLARE_LEVEL

#define TORCHFUSE_CALL_LEVEL(level, enumerator, function) \
  case CpuIsa::enumerator:                                \
    return cpu::level::function<Functor>(args, begin, end);

template <class Functor>
void fused_update_cpu(CpuIsa isa, const UpdateArgs<Functor>& args, std::int64_t begin,
                      std::int64_t end) {
  switch (entered(isa)) { TORCHFUSE_FOR_EACH_LEVEL(TORCHFUSE_CALL_LEVEL, fused_update) }
}

template <class Functor>
void fused_measure_cpu(CpuIsa isa, const MeasureArgs<Functor>& args, std::int64_t begin,
                       std::int64_t end) {
  switch (entered(isa)) { TORCHFUSE_FOR_EACH_LEVEL(TORCHFUSE_CALL_LEVEL, fused_measure) }
}
#undef TORCHFUSE_CALL_LEVEL

template <class Functor>
void tensor_norms(const MeasureArgs<Functor>& args, std::int64_t begin, std::int64_t end) {
  constexpr int kNorms = Functor::kNumNorms;
  const UpdateArgs<Functor>& update = args.update;
  if (update.scalars->skip != 0.0f) return;
  const bool wide = update.tensors.param == DType::kFloat64;
  for (std::int64_t t = begin; t < end; ++t) {
    const TensorRow& row = update.tensors.rows[t];
    MeasurePartial sums[kNorms] = {};
    for (std::int64_t chunk = args.chunk_offsets[t]; chunk < args.chunk_offsets[t + 1]; ++chunk) {
      for (int n = 0; n < kNorms; ++n) sums[n] = sums[n] + args.partials[chunk * kNorms + n];
    }
    if (args.sums != nullptr) {
      for (int n = 0; n < kNorms; ++n) args.sums[t * kNorms + n] = sums[n];
      continue;
    }
    const auto finish = wide ? finish_norms<Functor, double> : finish_norms<Functor, float>;
    finish(update.groups[row.group], static_cast<double>(*row.step), sums, row.tensor_state,
           args.norms + t * kNorms);
  }
}

}  // namespace torchfuse::kernels
