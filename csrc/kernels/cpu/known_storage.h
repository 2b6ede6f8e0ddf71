// SPDX-License-Identifier: BSD-3-Clause
// Update loops for operands with common storage types.
//
// Note [Known storage]
// The general loop tests each operand's type and presence at every vector. This costs nothing while
// memory is the limit. In the caches, on one thread of many memory channels, and with 16-bit
// operands, the tests took as long as the arithmetic, and for SGD three times as long. The storage
// types that most trainings use therefore have loops in which the compiler knows types and
// presence. The results are bit-identical.
#pragma once

#include "kernels/cpu/elements.h"
#include "kernels/cpu/operands.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

/// `kValue` is the type of the updated value, the master or the parameter. `kCopy` is the
/// parameter's type if there is a master, otherwise kValue.
template <DType kValue_, DType kCopy_, DType kGrad_, DType kState_>
struct Storage {
  static constexpr DType kValue = kValue_;
  static constexpr DType kCopy = kCopy_;
  static constexpr DType kGrad = kGrad_;
  static constexpr DType kState = kState_;
  static constexpr bool kHasCopy = kValue != kCopy;

  static bool holds(const Operands& operands, int used_states) {
    bool same = operands.param_in_dtype == kValue && operands.param_dtype == kCopy &&
                operands.grad_dtype == kGrad && (operands.master != nullptr) == kHasCopy;
    for (int k = 0; k < used_states; ++k) same = same && operands.state_dtype[k] == kState;
    return same;
  }
};
using AllFloat64 = Storage<DType::kFloat64, DType::kFloat64, DType::kFloat64, DType::kFloat64>;
using AllFloat32 = Storage<DType::kFloat32, DType::kFloat32, DType::kFloat32, DType::kFloat32>;
using AllBFloat16 = Storage<DType::kBFloat16, DType::kBFloat16, DType::kBFloat16, DType::kBFloat16>;
using BFloat16WideStates =
    Storage<DType::kBFloat16, DType::kBFloat16, DType::kBFloat16, DType::kFloat32>;
using BFloat16WithMaster =
    Storage<DType::kFloat32, DType::kBFloat16, DType::kBFloat16, DType::kFloat32>;

/// Number of states that are always used. Later states may be absent.
template <class Functor>
constexpr int kLeastStates = Functor::kNumStates;
template <class Functor>
  requires requires { Functor::kLeastStates; }
constexpr int kLeastStates<Functor> = Functor::kLeastStates;

/// Access to a full vector, and to a vector's first elements.
struct WholeVector {
  template <DType kDType>
  TORCHFUSE_INLINE VectorOf<kDType> load(const ElementOf<kDType>* p) const {
    return load_vector<kDType>(p);
  }
  template <DType kDType>
  TORCHFUSE_INLINE void store(ElementOf<kDType>* p, VectorOf<kDType> x) const {
    store_vector<kDType>(p, x);
  }
};
struct FirstElements {
  std::int64_t count;

  template <DType kDType>
  TORCHFUSE_INLINE VectorOf<kDType> load(const ElementOf<kDType>* p) const {
    return load_first<kDType>(p, count, VectorOf<kDType>(ComputeOf<kDType>(0)));
  }
  template <DType kDType>
  TORCHFUSE_INLINE void store(ElementOf<kDType>* p, VectorOf<kDType> x) const {
    store_first<kDType>(p, count, x);
  }
};

/// One tensor's operands. `kUsed` of them are states.
template <class Functor, class Storage, int kUsed>
struct KnownOperands {
  static constexpr int kStates = Functor::kNumStates;
  static constexpr bool kMovesStates = !kStatesInMeasure<Functor>;
  static constexpr std::int64_t kBlockElements = kBlock<ComputeOf<Storage::kValue>>;

  ElementOf<Storage::kValue>* values;
  ElementOf<Storage::kCopy>* copies;
  const ElementOf<Storage::kGrad>* grads;
  ElementOf<Storage::kState>* states[kStates];

  explicit KnownOperands(const Operands& operands)
      : values(static_cast<ElementOf<Storage::kValue>*>(Storage::kHasCopy ? operands.master
                                                                          : operands.param)),
        copies(static_cast<ElementOf<Storage::kCopy>*>(operands.param)),
        grads(static_cast<const ElementOf<Storage::kGrad>*>(operands.grad)) {
    for (int k = 0; k < kStates; ++k) {
      states[k] = static_cast<ElementOf<Storage::kState>*>(operands.state[k]);
    }
  }

  /// Prefetches ahead of the block at `i`, for an update or a measure. A store waits for its line
  /// like a load, so the copies that an update writes are prefetched too. With 16-bit states, the
  /// loop computes for longer than it waits for memory.
  template <bool kUpdates>
  TORCHFUSE_INLINE void fetch(std::int64_t i, Ahead ahead) const {
    if (i < ahead.near_end) fetch_to<1, kUpdates>(i);
    if (sizeof(ElementOf<Storage::kState>) > 2 && i < ahead.far_end) fetch_to<2, kUpdates>(i);
  }

  template <int kCacheLevel, bool kUpdates>
  TORCHFUSE_INLINE void fetch_to(std::int64_t i) const {
    const auto fetch_block = [&](const auto* operand) __attribute__((always_inline)) {
      constexpr auto kSize = static_cast<std::int64_t>(sizeof *operand);
      prefetch_ahead<kCacheLevel>(operand + i, 0, kBlockElements * kSize);
    };
    constexpr bool kReadsGrads = !kUpdates || kMovesStates;
    constexpr bool kReadsStates = kUpdates || !kMovesStates;
    fetch_block(values);
    if constexpr (kReadsGrads) fetch_block(grads);
#pragma GCC unroll 4
    for (int k = 0; k < (kReadsStates ? kUsed : 0); ++k) fetch_block(states[k]);
    if constexpr (kUpdates && Storage::kHasCopy) fetch_block(copies);
  }

  template <class Access, class V>
  TORCHFUSE_INLINE void load_states(std::int64_t i, const Access& access,
                                    V (&state)[kStates]) const {
#pragma GCC unroll 4
    for (int k = 0; k < kUsed; ++k) {
      state[k] = access.template load<Storage::kState>(states[k] + i);
    }
  }

  template <class Access, class V>
  TORCHFUSE_INLINE void store_states(std::int64_t i, const Access& access,
                                     const V (&state)[kStates]) const {
#pragma GCC unroll 4
    for (int k = 0; k < kUsed; ++k) {
      access.template store<Storage::kState>(states[k] + i, state[k]);
    }
  }

  template <class T, class Access>
  TORCHFUSE_INLINE void update(std::int64_t i, const typename Functor::template Coefs<T>& coefs,
                               T grad_coef, const Access& access) const {
    using V = typename Simd<T>::V;
    V value = access.template load<Storage::kValue>(values + i);
    V grad(T(0));
    if constexpr (kMovesStates) {
      grad = access.template load<Storage::kGrad>(grads + i) * V(grad_coef);
    }
    V state[kStates];
    for (V& absent : state) absent = V(T(0));
    load_states(i, access, state);
    Functor::update(value, grad, state, coefs);
    if constexpr (kMovesStates) store_states(i, access, state);
    access.template store<Storage::kValue>(values + i, value);
    if constexpr (Storage::kHasCopy) access.template store<Storage::kCopy>(copies + i, value);
  }

  static constexpr bool kHasPairLoop = kHasPairs<Storage::kValue> && kHasPairs<Storage::kGrad> &&
                                       kHasPairs<Storage::kState> && !Storage::kHasCopy;

  /// Updates two vectors of elements. The level decides which elements are in which vector.
  template <class T>
  TORCHFUSE_INLINE void update_pair(std::int64_t i,
                                    const typename Functor::template Coefs<T>& coefs,
                                    T grad_coef) const {
    using V = typename Simd<T>::V;
    V value[2];
    V grad[2] = {V(T(0)), V(T(0))};
    V state[2][kStates];
    load_bf16_pair(values + i, value[0], value[1]);
    if constexpr (kMovesStates) {
      load_bf16_pair(grads + i, grad[0], grad[1]);
      for (V& side : grad) side = side * V(grad_coef);
    }
#pragma GCC unroll 4
    for (int k = 0; k < kStates; ++k) {
      state[0][k] = state[1][k] = V(T(0));
      if (k < kUsed) load_bf16_pair(states[k] + i, state[0][k], state[1][k]);
    }
#pragma GCC unroll 2
    for (int side = 0; side < 2; ++side) {
      Functor::update(value[side], grad[side], state[side], coefs);
    }
#pragma GCC unroll 4
    for (int k = 0; k < (kMovesStates ? kUsed : 0); ++k) {
      store_bf16_pair(states[k] + i, state[0][k], state[1][k]);
    }
    store_bf16_pair(values + i, value[0], value[1]);
  }
};

/// Updates elements [begin, end): blocks, vectors, and the remaining elements. A separate function,
/// so that the loop can use all registers.
template <class Functor, class Storage, int kUsed, bool kInPairs, class T>
__attribute__((noinline)) void update_stored(const Operands& operands, std::int64_t begin,
                                             std::int64_t end,
                                             const typename Functor::template Coefs<T>& shared,
                                             T grad_coef) {
  constexpr std::int64_t kWidth = Simd<T>::kWidth;
  const KnownOperands<Functor, Storage, kUsed> known(operands);
  const auto coefs = shared;  // no store can change the copies
  const Ahead ahead = operands.ahead;
  std::int64_t i = begin;
  for (; i + kBlock<T> <= end; i += kBlock<T>) {
    known.template fetch<true>(i, ahead);
    if constexpr (kInPairs) {
#pragma GCC unroll 2
      for (std::int64_t v = 0; v < kBlock<T>; v += 2 * kWidth) {
        known.update_pair(i + v, coefs, grad_coef);
      }
    } else {
#pragma GCC unroll 4
      for (std::int64_t v = 0; v < kBlock<T>; v += kWidth) {
        known.update(i + v, coefs, grad_coef, WholeVector());
      }
    }
  }
  for (; i + kWidth <= end; i += kWidth) known.update(i, coefs, grad_coef, WholeVector());
  if (i < end) known.update(i, coefs, grad_coef, FirstElements{end - i});
}

/// Returns false, and does nothing, if the operands have another storage type.
template <class Functor, int kUsed, class T>
TORCHFUSE_INLINE bool update_known(const Operands& operands, std::int64_t begin, std::int64_t end,
                                   const typename Functor::template Coefs<T>& coefs, T grad_coef) {
  const auto run = [&]<class Kind>(Kind) {
    if (!Kind::holds(operands, kUsed)) return false;
    if constexpr (KnownOperands<Functor, Kind, kUsed>::kHasPairLoop) {
      if (pairs_are_faster(VectorOf<Kind::kValue>())) {
        update_stored<Functor, Kind, kUsed, true>(operands, begin, end, coefs, grad_coef);
        return true;
      }
    }
    update_stored<Functor, Kind, kUsed, false>(operands, begin, end, coefs, grad_coef);
    return true;
  };
  if constexpr (sizeof(T) == 8)
    return run(AllFloat64());
  else
    return run(AllFloat32()) || run(AllBFloat16()) || run(BFloat16WideStates()) ||
           run(BFloat16WithMaster());
}

template <class Functor, class T>
TORCHFUSE_INLINE bool update_known(const Operands& operands, std::int64_t begin, std::int64_t end,
                                   const typename Functor::template Coefs<T>& coefs,
                                   GradCoef<T> coef) {
  constexpr int kStates = Functor::kNumStates;
  if (operands.remainder != nullptr || operands.ema != nullptr || operands.stochastic ||
      operands.write_back || coef.tiny) {
    return false;
  }
  const T grad_coef = coef.factor;
  bool all = true;
  for (int k = 0; k < kStates; ++k) all = all && operands.state[k] != nullptr;
  if (all) return update_known<Functor, kStates>(operands, begin, end, coefs, grad_coef);
  if constexpr (kLeastStates<Functor> < kStates) {
    static_assert(kLeastStates<Functor> == kStates - 1, "only the last state may be absent");
    return update_known<Functor, kStates - 1>(operands, begin, end, coefs, grad_coef);
  }
  return false;
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
