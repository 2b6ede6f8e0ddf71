// SPDX-License-Identifier: BSD-3-Clause
// Elementwise optimizers on the CPU: flattened element ranges, vectors and tails. Bytes per element
// are the operands' size (fp32 Adam: 16 read, 12 written). Any alignment.
#pragma once

#include "kernels/common/math.h"
#include "kernels/cpu/known_storage.h"
#include "kernels/cpu/operands.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

/// Loads the value to update: the master in either storage form, or the parameter.
TORCHFUSE_INLINE VecF load_value(const Operands& operands, std::int64_t index, float) {
  if (operands.remainder == nullptr) {
    return load(operands.param_in, index, operands.param_in_dtype, 0.0f);
  }
  return load_split(static_cast<const BFloat16*>(operands.param_in) + index,
                    operands.remainder + index);
}
TORCHFUSE_INLINE VecD load_value(const Operands& operands, std::int64_t index, double) {
  return load(operands.param_in, index, DType::kFloat64, 0.0);
}

TORCHFUSE_INLINE void store_value(const Operands& operands, std::int64_t index, VecF value, float) {
  if (operands.remainder != nullptr) {
    return store_split(static_cast<BFloat16*>(operands.param) + index, operands.remainder + index,
                       value);
  }
  if (operands.stochastic) {
    return store_stochastic(static_cast<BFloat16*>(operands.param) + index, value,
                            operands.rounding, static_cast<std::uint64_t>(operands.first + index));
  }
  if (operands.master != nullptr) store(operands.master, index, DType::kFloat32, value, 0.0f);
  store(operands.param, index, operands.param_dtype, value, 0.0f);
}
TORCHFUSE_INLINE void store_value(const Operands& operands, std::int64_t index, VecD value,
                                  double) {
  store(operands.param, index, DType::kFloat64, value, 0.0);
}

/// See Note [Averages of weights] in common/ema.h.
template <class T, class V>
TORCHFUSE_INLINE void move_ema(const Operands& operands, std::int64_t index, V param) {
  if (operands.ema == nullptr) return;
  const EmaCoefs<T> coefs{static_cast<T>(operands.ema_coefs.weight), operands.ema_coefs.copies};
  const V ema = load(operands.ema, index, operands.ema_dtype, T());
  store(operands.ema, index, operands.ema_dtype, moved_ema(ema, param, coefs), T());
}

template <class T, class V, int kNumStates>
TORCHFUSE_INLINE void load_states(const Operands& operands, std::int64_t index,
                                  V (&state)[kNumStates]) {
#pragma GCC unroll 4
  for (int k = 0; k < kNumStates; ++k) {
    state[k] = operands.state[k] == nullptr
                   ? V(T(0))
                   : load(operands.state[k], index, operands.state_dtype[k], T());
  }
}

template <class T, class V, int kNumStates>
TORCHFUSE_INLINE void store_states(const Operands& operands, std::int64_t index,
                                   const V (&state)[kNumStates]) {
#pragma GCC unroll 4
  for (int k = 0; k < kNumStates; ++k) {
    if (operands.state[k] != nullptr) {
      store(operands.state[k], index, operands.state_dtype[k], state[k], T());
    }
  }
}

/// Updates the vector of elements at `index`.
template <class Functor, class T>
TORCHFUSE_INLINE void update_vector(const Operands& operands, std::int64_t index,
                                    const typename Functor::template Coefs<T>& coefs,
                                    GradCoef<T> grad_coef) {
  using V = typename Simd<T>::V;
  V param = load_value(operands, index, T());
  V grad(T(0));
  if constexpr (!kStatesInMeasure<Functor>) {
    grad = grad_coef.scaled(load(operands.grad, index, operands.grad_dtype, T()));
  }
  V state[Functor::kNumStates];
  load_states<T>(operands, index, state);
  Functor::update(param, grad, state, coefs);
  if constexpr (!kStatesInMeasure<Functor>) store_states<T>(operands, index, state);
  store_value(operands, index, param, T());
  move_ema<T>(operands, index, param);
  if (operands.write_back) store(operands.grad, index, operands.grad_dtype, grad, T());
}

template <class Functor, class T>
void update_tail(const Operands& operands, std::int64_t begin, std::int64_t count,
                 const typename Functor::template Coefs<T>& coefs, GradCoef<T> grad_coef) {
  TailCopy<Functor::kNumStates, 64> tail(operands, begin, count);
  update_vector<Functor, T>(tail.operands, 0, coefs, grad_coef);
  tail.put_back_source();
  if constexpr (!kStatesInMeasure<Functor>) tail.put_back_states();
}

/// Updates full vectors, and then the remaining elements.
template <class Functor, class T>
TORCHFUSE_INLINE void update_stretch(const Operands& operands, std::int64_t begin, std::int64_t end,
                                     const typename Functor::template Coefs<T>& coefs,
                                     GradCoef<T> grad_coef) {
  constexpr std::int64_t kWidth = Simd<T>::kWidth;
  std::int64_t i = begin;
  for (; i + kWidth <= end; i += kWidth) {
    const auto ahead = [&](const void* operand, DType dtype) {
      if (operand != nullptr && i < operands.ahead.near_end) {
        prefetch(operand, i * static_cast<std::int64_t>(size_of(dtype)) + kNearBytes);
      }
    };
    ahead(operands.param_in, operands.param_in_dtype);
    ahead(operands.remainder, DType::kBFloat16);
    ahead(operands.ema, operands.ema_dtype);
    if (!kStatesInMeasure<Functor>) ahead(operands.grad, operands.grad_dtype);
    for (int k = 0; k < Functor::kNumStates; ++k) ahead(operands.state[k], operands.state_dtype[k]);
    update_vector<Functor, T>(operands, i, coefs, grad_coef);
  }
  if (i < end) update_tail<Functor, T>(operands, i, end - i, coefs, grad_coef);
}

/// Updates one tensor's elements [begin, end). See Note [Known storage].
template <class Functor, class T>
TORCHFUSE_INLINE void update_tensor(const Operands& operands, std::int64_t begin, std::int64_t end,
                                    const typename Functor::template Coefs<T>& coefs,
                                    GradCoef<T> grad_coef) {
  if constexpr (Simd<T>::kWidth > 1) {
    if (update_known<Functor>(operands, begin, end, coefs, grad_coef)) return;
  }
  update_stretch<Functor, T>(operands, begin, end, coefs, grad_coef);
}

/// Like update_tensor(), if the element numbers for rounding are not consecutive. Updates one run
/// after the other, each like a tensor whose first element has number `operands.first`.
template <class Functor, class T>
void update_runs(Operands operands, const ElementNumbers& numbers, std::int64_t begin,
                 std::int64_t end, const typename Functor::template Coefs<T>& coefs,
                 GradCoef<T> grad_coef) {
  while (begin < end) {
    const std::int64_t run = begin / numbers.run;
    const std::int64_t next = (run + 1) * numbers.run;
    const std::int64_t stop = next < end ? next : end;
    operands.first = numbers.first + run * (numbers.stride - numbers.run);
    update_stretch<Functor, T>(operands, begin, stop, coefs, grad_coef);
    begin = stop;
  }
}

/// Prefetches the start of a later tensor's operands.
TORCHFUSE_INLINE void prefetch_starts(const TensorTable& table, std::int64_t t) {
  if (t + kTensorsAhead >= table.count) return;
  const TensorRow& row = table.rows[t + kTensorsAhead];
  const void* const operands[] = {row.param, row.grad, row.master, row.ema};
  for (const void* operand : operands) prefetch_start(operand);
  for (const void* state : row.state) prefetch_start(state);
}

template <class Functor, class T>
TORCHFUSE_INLINE void update_elements(const UpdateArgs<Functor>& args, std::int64_t begin,
                                      std::int64_t end) {
  const TensorTable& table = args.tensors;
  const auto grad_coef = grad_coef_of<T>(args.scalars->grad_coef);
  typename Functor::template Coefs<T> coefs{};
  // Most tensors share group and step count, so coefficients are only recomputed when these change.
  std::int32_t coefs_group = -1;
  double coefs_step = 0.0;
  for (std::int64_t t = find_row(table.offsets, table.count, begin); begin < end; ++t) {
    const TensorRow& row = table.rows[t];
    const std::int64_t stop = table.offsets[t + 1] < end ? table.offsets[t + 1] : end;
    if (stop == begin) continue;
    prefetch_starts(table, t);
    const typename Functor::Params& params = args.groups[row.group];
    const double step = own_step<Functor>(*row.step, row.start);
    if (row.group != coefs_group || step != coefs_step) {
      coefs_group = row.group;
      coefs_step = step;
      coefs = Functor::template prepare<T>(params, step);
    }
    if constexpr (Layerwise<Functor>) {
      Functor::apply_norms(params, args.norms + t * Functor::kNumNorms, coefs);
    }
    const std::int64_t from = begin - table.offsets[t];
    const std::int64_t to = stop - table.offsets[t];
    if (table.stochastic && row.numbers.run != 0) {
      update_runs<Functor, T>(operands_of(args, row), row.numbers, from, to, coefs, grad_coef);
    } else {
      update_tensor<Functor, T>(operands_of(args, row), from, to, coefs, grad_coef);
    }
    begin = stop;
  }
}

template <class Functor>
void fused_update(const UpdateArgs<Functor>& args, std::int64_t begin, std::int64_t end) {
  if (begin >= end || args.scalars->skip != 0.0f) return;
  if (args.tensors.param == DType::kFloat64) {
    update_elements<Functor, double>(args, begin, end);
  } else {
    const FlushDenormals flush;
    update_elements<Functor, float>(args, begin, end);
  }
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
