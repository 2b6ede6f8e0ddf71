// SPDX-License-Identifier: BSD-3-Clause
// The instruction levels that CPU kernels are compiled for.
//
// Note [One object per instruction level]
// Each file cpu/*_cpu.cpp that includes cpu/simd.h is compiled three times, with
// TORCHFUSE_ISA_NAMESPACE set to baseline, avx2 or avx512 and the matching compiler flags. All that
// it emits must lie in that namespace or be forced inline, or the linker may keep an AVX-512 copy
// of a shared function for every machine. tools/check_layers.py checks the objects' weak symbols.
#pragma once

namespace torchfuse::kernels {

/// kAvx2 includes FMA and F16C. kAvx512 includes BF16 (Sapphire Rapids, Zen 4 and later): rounding
/// to bf16 in integer arithmetic would cost more than the wider vectors win, so older AVX-512
/// processors run at kAvx2.
enum class CpuIsa { kBaseline, kAvx2, kAvx512 };

/// The best level that this processor and operating system offer.
CpuIsa detect_cpu_isa();

/// "baseline", "avx2" or "avx512".
const char* name_of(CpuIsa isa);

}  // namespace torchfuse::kernels
