// SPDX-License-Identifier: BSD-3-Clause
// The measure phase on the CPU, in kNormChunk-element chunks and in the lanes of cpu/lane_sums.h.
// The result is bit-identical wherever ranges are split and at every instruction level. Bytes per
// element: parameter and gradient, and also the states if the phase updates them (fp32 LAMB: 16
// read, 8 written). Any alignment.
#pragma once

#include <type_traits>

#include "kernels/common/math.h"
#include "kernels/cpu/fused_update.h"
#include "kernels/cpu/lane_sums.h"
#include "kernels/layerwise_optimizer.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

/// One chunk's sums.
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

/// Operands with any storage type, and the measure phase's accesses.
template <class Functor>
struct AnyOperands {
  static constexpr bool kMoves = kStatesInMeasure<Functor>;

  const Operands& operands;

  TORCHFUSE_INLINE void fetch(std::int64_t i, Ahead ahead) const {
    if (i >= ahead.near_end) return;
    const auto fetch_lanes = [&](const void* operand, DType dtype) __attribute__((always_inline)) {
      const std::int64_t size = static_cast<std::int64_t>(size_of(dtype));
      if (operand != nullptr) prefetch_ahead<1>(operand, i * size, kLanes * size);
    };
    fetch_lanes(operands.param_in, operands.param_in_dtype);
    fetch_lanes(operands.remainder, DType::kBFloat16);
    fetch_lanes(operands.grad, operands.grad_dtype);
    for (int k = 0; kMoves && k < Functor::kNumStates; ++k) {
      fetch_lanes(operands.state[k], operands.state_dtype[k]);
    }
  }

  /// Measures the vector at `i`, and updates the states if this phase does.
  template <class T, class V>
  TORCHFUSE_INLINE void measure(std::int64_t i, const typename Functor::template Coefs<T>& coefs,
                                GradCoef<T> grad_coef, V (&measured)[Functor::kNumNorms]) const {
    const V param = load_value(operands, i, T());
    const V grad = grad_coef.scaled(load(operands.grad, i, operands.grad_dtype, T()));
    V state[Functor::kNumStates] = {};
    if constexpr (kMoves) {
      load_states<T>(operands, i, state);
      Functor::move(param, grad, state, coefs);
      store_states<T>(operands, i, state);
      load_states<T>(operands, i, state);  // rounded
    }
    Functor::measure(param, grad, state, coefs, measured);
    if (kMoves && operands.write_back) store(operands.grad, i, operands.grad_dtype, grad, T());
  }
};

/// Like AnyOperands, for storage types that the compiler knows, and with one gradient factor. See
/// Note [Known storage].
template <class Functor, class Storage>
struct MeasuredOperands : KnownOperands<Functor, Storage, Functor::kNumStates> {
  using Base = KnownOperands<Functor, Storage, Functor::kNumStates>;
  static constexpr bool kMoves = kStatesInMeasure<Functor>;

  explicit MeasuredOperands(const Operands& operands) : Base(operands) {}

  TORCHFUSE_INLINE void fetch(std::int64_t begin, Ahead ahead) const {
#pragma GCC unroll 4
    for (std::int64_t i = begin; i < begin + kLanes; i += Base::kBlockElements) {
      Base::template fetch<false>(i, ahead);
    }
  }

  template <class T, class V>
  TORCHFUSE_INLINE void measure(std::int64_t i, const typename Functor::template Coefs<T>& coefs,
                                GradCoef<T> grad_coef, V (&measured)[Functor::kNumNorms]) const {
    const V value = load_vector<Storage::kValue>(this->values + i);
    const V grad = load_vector<Storage::kGrad>(this->grads + i) * V(grad_coef.factor);
    V state[Functor::kNumStates] = {};
    if constexpr (kMoves) {
      static_assert(std::is_same_v<ElementOf<Storage::kState>, T>, "states would be rounded");
      Base::load_states(i, WholeVector(), state);
      Functor::move(value, grad, state, coefs);
      Base::store_states(i, WholeVector(), state);
    }
    Functor::measure(value, grad, state, coefs, measured);
  }
};

/// Measures the 64 elements at `index`.
template <class Functor, class T, class Access, class V>
TORCHFUSE_INLINE void measure_lanes(const Access& access, std::int64_t index,
                                    const typename Functor::template Coefs<T>& coefs,
                                    GradCoef<T> grad_coef,
                                    V (&x)[Functor::kNumNorms][kLaneVectors<T>]) {
#pragma GCC unroll 2
  for (std::int64_t v = 0; v < kLaneVectors<T>; ++v) {
    V measured[Functor::kNumNorms];
    access.measure(index + v * Simd<T>::kWidth, coefs, grad_coef, measured);
    for (int n = 0; n < Functor::kNumNorms; ++n) x[n][v] = measured[n];
  }
}

/// Measures a tensor's last elements, fewer than 64, on zero-filled copies. Values beyond these
/// elements are not counted.
template <class Functor, class T, class V>
void measure_tail(const Operands& operands, std::int64_t begin, std::int64_t count,
                  const typename Functor::template Coefs<T>& coefs, GradCoef<T> grad_coef,
                  V (&x)[Functor::kNumNorms][kLaneVectors<T>]) {
  TailCopy<Functor::kNumStates, kLanes* static_cast<std::int64_t>(sizeof(T))> tail(operands, begin,
                                                                                   count);
  measure_lanes<Functor, T>(AnyOperands<Functor>{tail.operands}, 0, coefs, grad_coef, x);
  for (int n = 0; n < Functor::kNumNorms; ++n) {
    alignas(64) T lanes[kLanes];
    memcpy(lanes, x[n], sizeof lanes);
    for (std::int64_t lane = count; lane < kLanes; ++lane) lanes[lane] = T(0);
    memcpy(x[n], lanes, sizeof lanes);
  }
  if constexpr (kStatesInMeasure<Functor>) tail.put_back_states();
}

/// Measures one chunk: elements [begin, end) of a tensor.
template <class Functor, class T, class Access>
__attribute__((noinline)) void measure_chunk(const Operands& operands, const Access& access,
                                             std::int64_t begin, std::int64_t end,
                                             const typename Functor::template Coefs<T>& shared,
                                             GradCoef<T> grad_coef, MeasurePartial* partials) {
  using V = typename Simd<T>::V;
  const auto coefs = shared;  // no store can change the copy
  Measured<Functor, T> measured;
  V x[Functor::kNumNorms][kLaneVectors<T>];
  const Ahead ahead = operands.ahead;
  std::int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    access.fetch(i, ahead);
    measure_lanes<Functor, T>(access, i, coefs, grad_coef, x);
    measured.add(x);
  }
  if (i < end) {
    measure_tail<Functor, T>(operands, i, end - i, coefs, grad_coef, x);
    measured.add(x);
  }
  measured.write(partials);
}

/// Calls run(access), where `access` gives access to the operands.
template <class Functor, class T, class Run>
TORCHFUSE_INLINE void with_measured_operands(const Operands& operands, GradCoef<T> grad_coef,
                                             const Run& run) {
  const auto run_known = [&]<class Kind>(Kind) {
    if (!Kind::holds(operands, Functor::kNumStates)) return false;
    run(MeasuredOperands<Functor, Kind>(operands));
    return true;
  };
  if constexpr (Simd<T>::kWidth > 1) {
    if (operands.remainder == nullptr && !operands.write_back && !grad_coef.tiny) {
      if constexpr (sizeof(T) == 8) {
        if (run_known(AllFloat64())) return;
      } else if (run_known(AllFloat32()) || run_known(BFloat16WithMaster())) {
        return;
      }
    }
  }
  run(AnyOperands<Functor>{operands});
}

template <class Functor, class T>
TORCHFUSE_INLINE void measure_elements(const MeasureArgs<Functor>& args, std::int64_t begin,
                                       std::int64_t end) {
  const UpdateArgs<Functor>& update = args.update;
  const TensorTable& table = update.tensors;
  const auto grad_coef = grad_coef_of<T>(update.scalars->grad_coef);
  for (std::int64_t t = find_row(table.offsets, table.count, begin);
       t < table.count && table.offsets[t] < end; ++t) {
    const TensorRow& row = table.rows[t];
    const auto coefs =
        Functor::template prepare<T>(update.groups[row.group], static_cast<double>(*row.step));
    Operands operands = operands_of(update, row);
    operands.write_back = update.write_back_grads;
    prefetch_starts(table, t);
    with_measured_operands<Functor, T>(operands, grad_coef, [&](const auto& access) {
      const auto measure = [&](std::int64_t chunk, std::int64_t first, std::int64_t stop) {
        measure_chunk<Functor, T>(
            operands, access, first, stop, coefs, grad_coef,
            args.partials + (args.chunk_offsets[t] + chunk) * Functor::kNumNorms);
      };
      for_each_norm_chunk(table, t, begin, end, measure);
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
