// SPDX-License-Identifier: BSD-3-Clause
// Pairs of input and output types for normalizing rows.
#pragma once

#include "kernels/cpu/rows.h"
#include "kernels/layer_norm.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

/// Calls body.operator()<input, output>() with denormals flushed, except for fp64.
template <class Body>
TORCHFUSE_INLINE void with_dtypes(const LayerNormShape& shape, const Body& body) {
  with_dtype(shape.input, [&]<DType kInput>() __attribute__((always_inline)) {
    if constexpr (kInput == DType::kFloat16 || kInput == DType::kBFloat16) {
      if (shape.output == DType::kFloat32) {
        return body.template operator()<kInput, DType::kFloat32>();
      }
    }
    body.template operator()<kInput, kInput>();
  });
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
