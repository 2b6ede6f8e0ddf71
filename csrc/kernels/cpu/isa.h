// SPDX-License-Identifier: BSD-3-Clause
// The instruction levels that CPU kernels are compiled for.
//
// Note [One object per instruction level]
// Each file cpu/*_cpu.cpp that includes cpu/simd.h is compiled once per level of the processor's
// architecture, with TORCHFUSE_ISA_NAMESPACE set to its name and the matching compiler flags. All
// that it emits must lie in that namespace or be forced inline, or the linker may keep an AVX-512
// copy of a shared function for every machine. tools/check_layers.py checks the objects' weak
// symbols.
#pragma once

/// Calls apply(namespace, enumerator, arguments) for each level, from the least to the best. kAvx2
/// includes FMA and F16C. kAvx512 includes BF16 (Sapphire Rapids, Zen 4 and later): rounding to
/// bf16 in integer arithmetic would cost more than the wider vectors win, so older AVX-512
/// processors run at kAvx2. NEON is part of every aarch64 processor; the baseline is what it is
/// compared with.
#if defined(__aarch64__)
#define TORCHFUSE_FOR_EACH_LEVEL(apply, ...) \
  apply(baseline, kBaseline, __VA_ARGS__) apply(neon, kNeon, __VA_ARGS__)
#else
#define TORCHFUSE_FOR_EACH_LEVEL(apply, ...)                              \
  apply(baseline, kBaseline, __VA_ARGS__) apply(avx2, kAvx2, __VA_ARGS__) \
      apply(avx512, kAvx512, __VA_ARGS__)
#endif

namespace torchfuse::kernels {

#define TORCHFUSE_LEVEL(level, enumerator, ...) enumerator,
enum class CpuIsa { TORCHFUSE_FOR_EACH_LEVEL(TORCHFUSE_LEVEL) };
#undef TORCHFUSE_LEVEL

#define TORCHFUSE_LEVEL(level, enumerator, ...) CpuIsa::enumerator,
inline constexpr CpuIsa kCpuLevels[] = {TORCHFUSE_FOR_EACH_LEVEL(TORCHFUSE_LEVEL)};
#undef TORCHFUSE_LEVEL

/// The best level that this processor and operating system offer.
CpuIsa detect_cpu_isa();

/// "baseline", "avx2" or "avx512"; "baseline" or "neon".
const char* name_of(CpuIsa isa);

}  // namespace torchfuse::kernels
