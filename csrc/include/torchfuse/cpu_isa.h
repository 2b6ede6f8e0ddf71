// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

#include <torchfuse/export.h>

namespace torchfuse {

/// "baseline", "avx2" or "avx512": the instruction level of the CPU kernels.
TORCHFUSE_API std::string cpu_isa();
/// Chooses the level for all later calls in this process. Throws if the processor lacks it.
TORCHFUSE_API void set_cpu_isa(const std::string& name);

}  // namespace torchfuse
