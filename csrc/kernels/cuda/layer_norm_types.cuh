// SPDX-License-Identifier: BSD-3-Clause
// Dispatches layer normalization on pairs of storage types.
#pragma once

#include "kernels/cuda/rows.cuh"
#include "kernels/layer_norm.h"

namespace torchfuse::kernels::cuda {

/// Calls run(S{}, O{}) with the input's and the output's storage types.
template <class Run>
Status dispatch_rows(const LayerNormShape& shape, const char* what, const Run& run) {
  return dispatch_dtype(shape.input, what, [&]<class S>(S) {
    if constexpr (sizeof(S) == 2) {
      if (shape.output == DType::kFloat32) return run(S{}, float{});
    }
    return run(S{}, S{});
  });
}

}  // namespace torchfuse::kernels::cuda
