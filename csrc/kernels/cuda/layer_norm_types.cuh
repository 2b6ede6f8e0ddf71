// SPDX-License-Identifier: BSD-3-Clause
// Dispatches layer normalization on pairs of storage types.
#pragma once

#include "kernels/cuda/rows.cuh"
#include "kernels/layer_norm.h"

namespace torchfuse::kernels::cuda {

/// Calls run(S{}, O{}) with the input's and the output's storage types.
template <class Run>
Status dispatch_rows(const LayerNormShape& shape, const char* what, const Run& run) {
  const bool widened = shape.output == DType::kFloat32;
  switch (shape.input) {
    case DType::kFloat32:
      return run(float{}, float{});
    case DType::kFloat64:
      return run(double{}, double{});
    case DType::kFloat16:
      return widened ? run(Half{}, float{}) : run(Half{}, Half{});
    case DType::kBFloat16:
      return widened ? run(BFloat16{}, float{}) : run(BFloat16{}, BFloat16{});
  }
  return Status{cudaErrorInvalidValue, what};
}

}  // namespace torchfuse::kernels::cuda
