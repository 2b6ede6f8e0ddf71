// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/cpu/isa.h"

namespace torchfuse::kernels {

CpuIsa detect_cpu_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx2 && avx512) {
    return __builtin_cpu_supports("avx512bf16") ? CpuIsa::kAvx512Bf16 : CpuIsa::kAvx512;
  }
  if (avx2) return CpuIsa::kAvx2;
  return CpuIsa::kBaseline;
#elif defined(__aarch64__)
  return CpuIsa::kNeon;
#endif
}

bool bf16_instruction = false;

const char* name_of(CpuIsa isa) {
#if defined(__x86_64__)
  if (isa == CpuIsa::kAvx512Bf16) return "avx512_bf16";
#endif
#define TORCHFUSE_LEVEL(level, enumerator, ...) \
  case CpuIsa::enumerator:                      \
    return #level;
  switch (isa) { TORCHFUSE_FOR_EACH_LEVEL(TORCHFUSE_LEVEL) }
#undef TORCHFUSE_LEVEL
  return "baseline";
}

}  // namespace torchfuse::kernels
