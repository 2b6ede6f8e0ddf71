// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

#include <torchfuse/export.h>

namespace torchfuse {

/// Returns the instruction level of the CPU kernels: "baseline", "avx2" or "avx512"; on aarch64
/// "baseline" or "neon".
TORCHFUSE_API std::string cpu_isa();
/// Sets the instruction level of the CPU kernels for all later calls in this process. Throws for
/// another name and for a level that the processor lacks.
TORCHFUSE_API void set_cpu_isa(const std::string& name);

}  // namespace torchfuse
