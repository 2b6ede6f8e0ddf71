// SPDX-License-Identifier: BSD-3-Clause
// Computations and prefetches of the backward passes.
#pragma once

#include <cstdint>

#include "kernels/batch_norm_backward.h"
#include "kernels/cpu/batch_norm_vectors.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

/// Selects where the output's gradient passes: everywhere (kOpen), where the recomputed output is
/// positive (kComputed), or where the given output is positive (kOutput). With kOutput, the
/// gradient behind the ReLU may also be written.
enum class Gate { kOpen, kComputed, kOutput };

template <Gate kGate, class V>
TORCHFUSE_INLINE V passed(V dy, V deviation, V output, V scale, V shift) {
  if constexpr (kGate == Gate::kComputed) {
    return pass_where_positive(normalize(deviation, scale, shift), dy);
  }
  if constexpr (kGate == Gate::kOutput) return pass_where_positive(output, dy);
  return dy;
}

template <bool kRelu, class V>
TORCHFUSE_INLINE V grad_input_of(V dy, V x, V center, V scale, V shift, V dy_scale,
                                 V deviation_scale, V constant) {
  const V deviation = x - center;
  const V passing = passed<kRelu ? Gate::kComputed : Gate::kOpen>(dy, deviation, x, scale, shift);
  return grad_input(passing, deviation, dy_scale, deviation_scale, constant);
}

/// Returns the address for the gradient behind the ReLU at `offset`, or null if it is not wanted.
template <DType kDType>
TORCHFUSE_INLINE ElementOf<kDType>* grad_residual_at(const BatchNormBackwardReduceArgs& args,
                                                     std::int64_t offset) {
  if (args.grad_residual == nullptr) return nullptr;
  return static_cast<ElementOf<kDType>*>(args.grad_residual) + offset;
}

/// Prefetches ahead of `count` elements of each operand: see prefetch_plane().
template <Gate kGate, class E>
TORCHFUSE_INLINE void prefetch_planes(const E* dy, const E* x, const E* y, std::int64_t count,
                                      std::int64_t left) {
  prefetch_plane(dy, count, left);
  prefetch_plane(x, count, left);
  if (kGate == Gate::kOutput) prefetch_plane(y, count, left);
}

/// Like prefetch_planes(), for rows: see prefetch_rows().
template <DType kDType, Gate kGate, std::int64_t kRows, class E>
TORCHFUSE_INLINE void prefetch_block(const BatchNormBackwardReduceArgs& args, const E* dy,
                                     const E* x, const E* y, std::int64_t channels, std::int64_t r,
                                     std::int64_t c, bool far) {
  constexpr std::int64_t kWidth = kWidthOf<kDType>;
  prefetch_rows<kRows, kWidth>(dy, args.grad_output, channels, r, c, far);
  prefetch_rows<kRows, kWidth>(x, args.input, channels, r, c, far);
  if (kGate == Gate::kOutput) prefetch_rows<kRows, kWidth>(y, args.output, channels, r, c, far);
}

template <class T>
TORCHFUSE_INLINE void store_partials(const T* sum, const T* sum_deviation, std::int64_t channels,
                                     double* partials) {
  for (std::int64_t c = 0; c < channels; ++c) {
    partials[c * kGradPartial] = static_cast<double>(sum[c]);
    partials[c * kGradPartial + 1] = static_cast<double>(sum_deviation[c]);
  }
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
