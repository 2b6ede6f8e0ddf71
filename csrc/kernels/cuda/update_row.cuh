// SPDX-License-Identifier: BSD-3-Clause
// One parameter in the arguments of an update kernel.
#pragma once

#include <cstdint>

namespace torchfuse::kernels::cuda {

template <bool kLayerwise>
struct RowNorms {};
template <>
struct RowNorms<true> {
  const double* norms;
};

template <int kStreams, bool kLayerwise>
struct UpdateRow : RowNorms<kLayerwise> {
  void* streams[kStreams];
  float* step;
  std::int64_t numel;
};

/// With the number of the parameter, which stochastic rounding asks for.
template <int kStreams, bool kLayerwise>
struct NumberedUpdateRow : UpdateRow<kStreams, kLayerwise> {
  std::int64_t index;
};

}  // namespace torchfuse::kernels::cuda
