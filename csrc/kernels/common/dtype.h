// SPDX-License-Identifier: BSD-3-Clause
// Storage types that kernels read and write.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/macros.h"

namespace torchfuse::kernels {

enum class DType : std::uint8_t { kFloat32, kFloat16, kBFloat16, kFloat64 };

TORCHFUSE_HOST_DEVICE constexpr std::size_t size_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

}  // namespace torchfuse::kernels
