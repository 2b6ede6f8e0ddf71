// SPDX-License-Identifier: BSD-3-Clause
// The CPU driver of the measure phase, in chunks of kNormChunk elements and lanes of
// cpu/lane_sums.h: the same bits wherever ranges are split and at every instruction level. Bytes
// per element: parameter and gradient, and the states where the phase moves them (fp32 LAMB: 16
// read, 8 written); any alignment.
#pragma once

#include "kernels/common/math.h"
#include "kernels/cpu/lane_sums.h"
#include "kernels/cpu/multi_tensor_apply.h"
#include "kernels/layerwise_optimizer.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

/// The sums of one chunk.
template <class Functor, class T>
struct Measured {
  using V = typename Simd<T>::V;
  Sums<T> sums[Functor::kNumNorms];
  V small[Functor::kNumNorms][kLaneVectors<T>];
  V largest[Functor::kNumNorms];

  TORCHFUSE_INLINE Measured() {
    for (int n = 0; n < Functor::kNumNorms; ++n) {
      for (V& vector : small[n]) vector = V(T(0));
      largest[n] = V(T(0));
    }
  }

  TORCHFUSE_INLINE void add(const V (&x)[Functor::kNumNorms][kLaneVectors<T>]) {
    for (int n = 0; n < Functor::kNumNorms; ++n) {
      V block_largest(T(0));
#pragma GCC unroll 16
      for (std::int64_t v = 0; v < kLaneVectors<T>; ++v) {
        block_largest = larger_magnitude(block_largest, x[n][v]);
      }
      add_lanes<T>(sums[n], small[n], x[n], block_largest);
      largest[n] = larger_magnitude(largest[n], block_largest);
    }
  }

  TORCHFUSE_INLINE void write(MeasurePartial* partials) {
    for (int n = 0; n < Functor::kNumNorms; ++n) {
      memcpy(sums[n].small, small[n], sizeof sums[n].small);
      alignas(64) T lanes[Simd<T>::kWidth];
      memcpy(lanes, &largest[n], sizeof lanes);
      T all = lanes[0];
      for (const T lane : lanes) all = kernels::max(all, lane);
      partials[n] = {finish(sums[n]), static_cast<double>(all)};
    }
  }
};

/// Measures the 64 elements at `index`, moving the states where this phase does.
template <class Functor, class T, class V>
TORCHFUSE_INLINE void measure_lanes(const Streams& streams, std::int64_t index,
                                    const typename Functor::template Coefs<T>& coefs, T grad_coef,
                                    V (&x)[Functor::kNumNorms][kLaneVectors<T>]) {
  constexpr bool kMoves = kStatesInMeasure<Functor>;
#pragma GCC unroll 2
  for (std::int64_t v = 0; v < kLaneVectors<T>; ++v) {
    const std::int64_t i = index + v * Simd<T>::kWidth;
    const V param = load_value(streams, i, T());
    const V grad = load(streams.grad, i, streams.grad_dtype, T()) * V(grad_coef);
    V state[Functor::kNumStates] = {};
    if constexpr (kMoves) load_states<T>(streams, i, state);
    V measured[Functor::kNumNorms];
    Functor::measure(param, grad, state, coefs, measured);
    for (int n = 0; n < Functor::kNumNorms; ++n) x[n][v] = measured[n];
    if constexpr (kMoves) store_states<T>(streams, i, state);
    if (kMoves && streams.write_back) store(streams.grad, i, streams.grad_dtype, grad, T());
  }
}

/// The last elements of a tensor, fewer than 64, on zero-filled copies. What is measured beyond
/// them is not counted.
template <class Functor, class T, class V>
void measure_tail(const Streams& streams, std::int64_t begin, std::int64_t count,
                  const typename Functor::template Coefs<T>& coefs, T grad_coef,
                  V (&x)[Functor::kNumNorms][kLaneVectors<T>]) {
  alignas(64) char buffer[3 + kMaxStates][kLanes * sizeof(T)] = {};
  Streams local = streams;
  const auto at = [&](const void* stream, DType dtype) {
    return static_cast<const char*>(stream) + begin * static_cast<std::int64_t>(size_of(dtype));
  };
  const auto bytes = [&](DType dtype) { return count * static_cast<std::int64_t>(size_of(dtype)); };
  copy_bytes(buffer[0], at(streams.param_in, streams.param_in_dtype),
             bytes(streams.param_in_dtype));
  copy_bytes(buffer[1], at(streams.grad, streams.grad_dtype), bytes(streams.grad_dtype));
  local.param_in = buffer[0];
  local.grad = buffer[1];
  if (streams.remainder != nullptr) {
    char* remainders = buffer[2 + kMaxStates];
    copy_bytes(remainders, at(streams.remainder, DType::kBFloat16), bytes(DType::kBFloat16));
    local.remainder = reinterpret_cast<std::int16_t*>(remainders);
  }
  for (int k = 0; k < Functor::kNumStates; ++k) {
    if (streams.state[k] == nullptr) continue;
    copy_bytes(buffer[2 + k], at(streams.state[k], streams.state_dtype[k]),
               bytes(streams.state_dtype[k]));
    local.state[k] = buffer[2 + k];
  }
  measure_lanes<Functor, T>(local, 0, coefs, grad_coef, x);
  for (int n = 0; n < Functor::kNumNorms; ++n) {
    alignas(64) T lanes[kLanes];
    memcpy(lanes, x[n], sizeof lanes);
    for (std::int64_t lane = count; lane < kLanes; ++lane) lanes[lane] = T(0);
    memcpy(x[n], lanes, sizeof lanes);
  }
  if constexpr (kStatesInMeasure<Functor>) {
    const auto put_back = [&](const void* stream, const char* slot, DType dtype) {
      copy_bytes(const_cast<char*>(at(stream, dtype)), slot, bytes(dtype));
    };
    for (int k = 0; k < Functor::kNumStates; ++k) {
      if (streams.state[k] != nullptr) {
        put_back(streams.state[k], buffer[2 + k], streams.state_dtype[k]);
      }
    }
    if (streams.write_back) put_back(streams.grad, buffer[1], streams.grad_dtype);
  }
}

/// One chunk: elements [begin, end) of a tensor.
template <class Functor, class T>
TORCHFUSE_INLINE void measure_chunk(const Streams& streams, std::int64_t begin, std::int64_t end,
                                    const typename Functor::template Coefs<T>& coefs, T grad_coef,
                                    MeasurePartial* partials) {
  using V = typename Simd<T>::V;
  Measured<Functor, T> measured;
  V x[Functor::kNumNorms][kLaneVectors<T>];
  std::int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    const auto ahead = [&](const void* stream, DType dtype) {
      const std::int64_t size = static_cast<std::int64_t>(size_of(dtype));
      for (std::int64_t line = 0; stream != nullptr && line < kLanes * size; line += 64) {
        prefetch(stream, i * size + line + kPrefetchBytes);
      }
    };
    ahead(streams.param_in, streams.param_in_dtype);
    ahead(streams.remainder, DType::kBFloat16);
    ahead(streams.grad, streams.grad_dtype);
    for (int k = 0; kStatesInMeasure<Functor> && k < Functor::kNumStates; ++k) {
      ahead(streams.state[k], streams.state_dtype[k]);
    }
    measure_lanes<Functor, T>(streams, i, coefs, grad_coef, x);
    measured.add(x);
  }
  if (i < end) {
    measure_tail<Functor, T>(streams, i, end - i, coefs, grad_coef, x);
    measured.add(x);
  }
  measured.write(partials);
}

template <class Functor, class T>
TORCHFUSE_INLINE void measure_elements(const MeasureArgs<Functor>& args, std::int64_t begin,
                                       std::int64_t end) {
  const UpdateArgs<Functor>& update = args.update;
  const TensorTable& table = update.tensors;
  const T grad_coef = round_to<T>(update.scalars->grad_coef);
  for (std::int64_t t = find_row(table.offsets, table.count, begin);
       t < table.count && table.offsets[t] < end; ++t) {
    const TensorRow& row = table.rows[t];
    const auto coefs =
        Functor::template prepare<T>(update.groups[row.group], static_cast<double>(*row.step));
    Streams streams = make_streams(update, row);
    streams.write_back = update.write_back_grads;
    prefetch_start(table, t);
    for_each_norm_chunk(
        table, t, begin, end, [&](std::int64_t chunk, std::int64_t first, std::int64_t stop) {
          measure_chunk<Functor, T>(streams, first, stop, coefs, grad_coef,
                                    args.partials + (args.chunk_offsets[t] + chunk) * Functor::kNumNorms);
        });
  }
}

template <class Functor>
void fused_measure(const MeasureArgs<Functor>& args, std::int64_t begin, std::int64_t end) {
  if (begin >= end || args.update.scalars->skip != 0.0f) return;
  if (args.update.tensors.param == DType::kFloat64) {
    measure_elements<Functor, double>(args, begin, end);
  } else {
    const FlushDenormals flush;
    measure_elements<Functor, float>(args, begin, end);
  }
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
