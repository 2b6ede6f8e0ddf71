// SPDX-License-Identifier: BSD-3-Clause
// The phases of any functor on the CPU, over the three objects that hold its instruction levels.
#pragma once

#include "kernels/layerwise_optimizer.h"

namespace torchfuse::kernels {

#define TORCHFUSE_DECLARE_LEVEL(level)                                         \
  namespace cpu::level {                                                       \
  template <class Functor>                                                     \
  void fused_update(const UpdateArgs<Functor>&, std::int64_t, std::int64_t);   \
  template <class Functor>                                                     \
  void fused_measure(const MeasureArgs<Functor>&, std::int64_t, std::int64_t); \
  }
TORCHFUSE_DECLARE_LEVEL(baseline)
TORCHFUSE_DECLARE_LEVEL(avx2)
TORCHFUSE_DECLARE_LEVEL(avx512)
#undef TORCHFUSE_DECLARE_LEVEL

template <class Functor>
void fused_update_cpu(CpuIsa isa, const UpdateArgs<Functor>& args, std::int64_t begin,
                      std::int64_t end) {
  switch (isa) {
    case CpuIsa::kAvx512:
      return cpu::avx512::fused_update<Functor>(args, begin, end);
    case CpuIsa::kAvx2:
      return cpu::avx2::fused_update<Functor>(args, begin, end);
    case CpuIsa::kBaseline:
      return cpu::baseline::fused_update<Functor>(args, begin, end);
  }
}

template <class Functor>
void fused_measure_cpu(CpuIsa isa, const MeasureArgs<Functor>& args, std::int64_t begin,
                       std::int64_t end) {
  switch (isa) {
    case CpuIsa::kAvx512:
      return cpu::avx512::fused_measure<Functor>(args, begin, end);
    case CpuIsa::kAvx2:
      return cpu::avx2::fused_measure<Functor>(args, begin, end);
    case CpuIsa::kBaseline:
      return cpu::baseline::fused_measure<Functor>(args, begin, end);
  }
}

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
