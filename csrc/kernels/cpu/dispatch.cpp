// SPDX-License-Identifier: BSD-3-Clause
// Chooses the instruction level of the ops that are not templates.
#include "kernels/multi_tensor_l2_norm.h"
#include "kernels/multi_tensor_unscale.h"

namespace torchfuse::kernels {

#define TORCHFUSE_DECLARE_LEVEL(level)                                       \
  namespace cpu::level {                                                     \
  void multi_tensor_l2_norm(const L2NormArgs&, std::int64_t, std::int64_t);  \
  bool multi_tensor_unscale(const UnscaleArgs&, std::int64_t, std::int64_t); \
  }
TORCHFUSE_DECLARE_LEVEL(baseline)
TORCHFUSE_DECLARE_LEVEL(avx2)
TORCHFUSE_DECLARE_LEVEL(avx512)
#undef TORCHFUSE_DECLARE_LEVEL

void multi_tensor_l2_norm_cpu(CpuIsa isa, const L2NormArgs& args, std::int64_t begin,
                              std::int64_t end) {
  switch (isa) {
    case CpuIsa::kAvx512:
      return cpu::avx512::multi_tensor_l2_norm(args, begin, end);
    case CpuIsa::kAvx2:
      return cpu::avx2::multi_tensor_l2_norm(args, begin, end);
    case CpuIsa::kBaseline:
      return cpu::baseline::multi_tensor_l2_norm(args, begin, end);
  }
}

bool multi_tensor_unscale_cpu(CpuIsa isa, const UnscaleArgs& args, std::int64_t begin,
                              std::int64_t end) {
  switch (isa) {
    case CpuIsa::kAvx512:
      return cpu::avx512::multi_tensor_unscale(args, begin, end);
    case CpuIsa::kAvx2:
      return cpu::avx2::multi_tensor_unscale(args, begin, end);
    case CpuIsa::kBaseline:
      break;
  }
  return cpu::baseline::multi_tensor_unscale(args, begin, end);
}

}  // namespace torchfuse::kernels
