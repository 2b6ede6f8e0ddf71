// SPDX-License-Identifier: BSD-3-Clause
// The instruction levels that CPU kernels are compiled for.
//
// Note [One object per instruction level]
// Each file cpu/*_cpu.cpp that includes cpu/simd.h is compiled once per instruction level of the
// architecture, with TORCHFUSE_ISA_NAMESPACE set to the level's name and the matching compiler
// flags. All emitted code must be in that namespace or be forced inline. Otherwise the linker may
// keep an AVX-512 copy of a shared function for every machine. tools/check_layers.py checks the
// objects' weak symbols.
#pragma once

/// Calls apply(namespace, enumerator, arguments) for each level, from the lowest to the best. kAvx2
/// includes FMA and F16C. kAvx512 and kAvx512Bf16 share objects: see `bf16_instruction`. Every
/// aarch64 processor has NEON; the baseline is only for comparison.
#if defined(__aarch64__)
#define TORCHFUSE_FOR_EACH_LEVEL(apply, ...) \
  apply(baseline, kBaseline, __VA_ARGS__) apply(neon, kNeon, __VA_ARGS__)
#else
#define TORCHFUSE_FOR_EACH_LEVEL(apply, ...)                              \
  apply(baseline, kBaseline, __VA_ARGS__) apply(avx2, kAvx2, __VA_ARGS__) \
      apply(avx512, kAvx512, __VA_ARGS__) apply(avx512, kAvx512Bf16, __VA_ARGS__)
#endif

namespace torchfuse::kernels {

#define TORCHFUSE_LEVEL(level, enumerator, ...) enumerator,
enum class CpuIsa { TORCHFUSE_FOR_EACH_LEVEL(TORCHFUSE_LEVEL) };
#undef TORCHFUSE_LEVEL

#define TORCHFUSE_LEVEL(level, enumerator, ...) CpuIsa::enumerator,
inline constexpr CpuIsa kCpuLevels[] = {TORCHFUSE_FOR_EACH_LEVEL(TORCHFUSE_LEVEL)};
#undef TORCHFUSE_LEVEL

/// Returns the best level that the processor and operating system support.
CpuIsa detect_cpu_isa();

/// Returns "baseline", "avx2", "avx512" or "avx512_bf16"; on aarch64 "baseline" or "neon".
const char* name_of(CpuIsa isa);

/// Whether AVX-512 objects round to bf16 with an instruction (Sapphire Rapids, Zen 4 and later), or
/// in integer arithmetic. Objects of their own would double the library's AVX-512 code, but only
/// stores of bf16 differ. Read and written atomically.
extern bool bf16_instruction;

/// Whether a processor of this level is known to multiply bf16 in hardware.
inline bool multiplies_bf16([[maybe_unused]] CpuIsa isa) {
#if defined(__x86_64__)
  return isa == CpuIsa::kAvx512Bf16;
#else
  return false;
#endif
}

/// Returns `isa`, and sets `bf16_instruction` accordingly. Threads that use different levels at
/// once still get equal results: see store_bf16() of the AVX-512 level for the exceptions.
inline CpuIsa entered(CpuIsa isa) {
#if defined(__x86_64__)
  const bool bf16 = isa == CpuIsa::kAvx512Bf16;
  if (__atomic_load_n(&bf16_instruction, __ATOMIC_RELAXED) != bf16) {
    __atomic_store_n(&bf16_instruction, bf16, __ATOMIC_RELAXED);
  }
#endif
  return isa;
}

}  // namespace torchfuse::kernels
