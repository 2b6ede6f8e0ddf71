// SPDX-License-Identifier: BSD-3-Clause
// What the measure kernel does with storage types that are looked up as it runs: see Note [Mixed
// storage].
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/cuda/mixed_update_kernel.cuh"
#include "kernels/cuda/thread_sums.cuh"

namespace torchfuse::kernels::cuda {

/// The vector that begins at element `index`.
template <class Functor>
__device__ __forceinline__ void measure_vector(const MixedChunk<Functor>& chunk,
                                               std::uint32_t index,
                                               ThreadMeasure<float> (&sums)[Functor::kNumNorms]) {
  using Types = MixedTypes<Functor>;
  constexpr int kVec = MixedVec::kElements;
  constexpr int kNorms = Functor::kNumNorms;
  constexpr int kGrad = Types::kGradStream;
  constexpr int kState = Types::kStateStream;
  MixedVec raw_source;
  MixedVec raw_grad;
  MixedVec raw_state[Types::kStates] = {};
  load_source<false>(chunk, index, raw_source);
  load_mixed<false>(raw_grad, chunk.streams[kGrad], index, chunk.dtype(kGrad));
  if constexpr (Types::kStatesMoved) {
#pragma unroll
    for (int k = 0; k < Types::kStates; ++k) {
      if (!chunk.uses_state[k]) continue;
      load_mixed<false>(raw_state[k], chunk.streams[kState + k], index, chunk.dtype(kState + k));
    }
  }
  float param[kVec];
  float grad[kVec];
  float state[Types::kStates][kVec];
  widen_source(chunk, raw_source, param);
  widen_mixed(raw_grad, chunk.dtype(kGrad), grad);
#pragma unroll
  for (int k = 0; k < Types::kStates; ++k) {
    widen_mixed(raw_state[k], chunk.dtype(kState + k), state[k]);
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    float element_state[Types::kStates];
#pragma unroll
    for (int k = 0; k < Types::kStates; ++k) element_state[k] = state[k][i];
    grad[i] = grad[i] * chunk.grad_coef;
    float measured[kNorms];
    Functor::measure(param[i], grad[i], element_state, *chunk.coefs, measured);
#pragma unroll
    for (int n = 0; n < kNorms; ++n) sums[n].add(measured[n], i % 4);
#pragma unroll
    for (int k = 0; k < Types::kStates; ++k) state[k][i] = element_state[k];
  }
  if constexpr (Types::kStatesMoved) {
#pragma unroll
    for (int k = 0; k < Types::kStates; ++k) {
      if (!chunk.uses_state[k]) continue;
      store_mixed<false>(chunk.streams[kState + k], index, chunk.dtype(kState + k), state[k]);
    }
    if (chunk.write_back_grads) {
      store_mixed<false>(chunk.streams[kGrad], index, chunk.dtype(kGrad), grad);
    }
  }
}

/// Element `index` by itself, behind the vectors.
template <class Functor>
__device__ __forceinline__ void measure_single(const MixedChunk<Functor>& chunk,
                                               std::uint32_t index,
                                               ThreadMeasure<float> (&sums)[Functor::kNumNorms]) {
  using Types = MixedTypes<Functor>;
  constexpr int kGrad = Types::kGradStream;
  constexpr int kState = Types::kStateStream;
  const float param = load_source_element(chunk, index);
  const float grad =
      load_mixed_element(chunk.streams[kGrad], index, chunk.dtype(kGrad)) * chunk.grad_coef;
  float state[Types::kStates] = {};
  if constexpr (Types::kStatesMoved) {
#pragma unroll
    for (int k = 0; k < Types::kStates; ++k) {
      if (!chunk.uses_state[k]) continue;
      state[k] = load_mixed_element(chunk.streams[kState + k], index, chunk.dtype(kState + k));
    }
  }
  float measured[Functor::kNumNorms];
  Functor::measure(param, grad, state, *chunk.coefs, measured);
#pragma unroll
  for (int n = 0; n < Functor::kNumNorms; ++n) sums[n].add(measured[n], 0);
  if constexpr (Types::kStatesMoved) {
#pragma unroll
    for (int k = 0; k < Types::kStates; ++k) {
      if (!chunk.uses_state[k]) continue;
      store_mixed_element(chunk.streams[kState + k], index, chunk.dtype(kState + k), state[k]);
    }
    if (chunk.write_back_grads) {
      store_mixed_element(chunk.streams[kGrad], index, chunk.dtype(kGrad), grad);
    }
  }
}

}  // namespace torchfuse::kernels::cuda
