// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

#include <torchfuse/export.h>

namespace torchfuse {

/// Returns the instruction level of the CPU kernels: "baseline", "avx2", "avx512" or
/// "avx512_bf16"; on aarch64 "baseline" or "neon".
TORCHFUSE_API std::string cpu_isa();
/// Sets the instruction level of the CPU kernels for all later calls in this process.
/// @param name a value that cpu_isa() can return.
/// @throws c10::Error for another name and for a level that the processor does not support.
TORCHFUSE_API void set_cpu_isa(const std::string& name);

}  // namespace torchfuse
