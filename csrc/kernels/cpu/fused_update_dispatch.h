// SPDX-License-Identifier: BSD-3-Clause
// fused_update_cpu for any functor, over the three objects that hold its levels.
#pragma once

#include "kernels/fused_optimizer.h"

namespace torchfuse::kernels {

#define TORCHFUSE_DECLARE_LEVEL(level)                                       \
  namespace cpu::level {                                                     \
  template <class Functor>                                                   \
  void fused_update(const UpdateArgs<Functor>&, std::int64_t, std::int64_t); \
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

}  // namespace torchfuse::kernels
