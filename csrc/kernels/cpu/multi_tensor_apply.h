// SPDX-License-Identifier: BSD-3-Clause
// The CPU driver of elementwise optimizers: flattened element ranges, vectors and tails. Bytes per
// element are the streams' own (fp32 Adam: 16 read, 12 written); any alignment.
#pragma once

#include "kernels/common/math.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/simd_random.h"
#include "kernels/fused_optimizer.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

/// Bytes ahead of the current element at which streams are prefetched, measured best between 1 and
/// 2 KB on Sapphire Rapids and EPYC.
constexpr std::int64_t kPrefetchBytes = 1024;

/// The streams of one tensor, with their storage types.
struct Streams {
  const void* param_in;  ///< the master where there is one
  void* param;
  void* master;
  std::int16_t* remainder;
  void* grad;
  void* state[kMaxStates];
  DType param_in_dtype;
  DType param_dtype;
  DType grad_dtype;
  DType state_dtype[kMaxStates];
  bool write_back;
  bool stochastic;
  RoundingKey rounding;
  std::int64_t first;  ///< element of the tensor at which the streams begin
};

/// The value that is updated: the master, wherever it is kept, or the parameter.
TORCHFUSE_INLINE VecF load_value(const Streams& streams, std::int64_t index, float) {
  if (streams.remainder == nullptr) {
    return load(streams.param_in, index, streams.param_in_dtype, 0.0f);
  }
  return load_split(static_cast<const BFloat16*>(streams.param_in) + index,
                    streams.remainder + index);
}
TORCHFUSE_INLINE VecD load_value(const Streams& streams, std::int64_t index, double) {
  return load(streams.param_in, index, DType::kFloat64, 0.0);
}

TORCHFUSE_INLINE void store_value(const Streams& streams, std::int64_t index, VecF value, float) {
  if (streams.remainder != nullptr) {
    return store_split(static_cast<BFloat16*>(streams.param) + index, streams.remainder + index,
                       value);
  }
  if (streams.stochastic) {
    return store_stochastic(static_cast<BFloat16*>(streams.param) + index, value, streams.rounding,
                            static_cast<std::uint64_t>(streams.first + index));
  }
  if (streams.master != nullptr) store(streams.master, index, DType::kFloat32, value, 0.0f);
  store(streams.param, index, streams.param_dtype, value, 0.0f);
}
TORCHFUSE_INLINE void store_value(const Streams& streams, std::int64_t index, VecD value, double) {
  store(streams.param, index, DType::kFloat64, value, 0.0);
}

template <class T, class V, int kNumStates>
TORCHFUSE_INLINE void load_states(const Streams& streams, std::int64_t index,
                                  V (&state)[kNumStates]) {
#pragma GCC unroll 4
  for (int k = 0; k < kNumStates; ++k) {
    state[k] = streams.state[k] == nullptr
                   ? V(T(0))
                   : load(streams.state[k], index, streams.state_dtype[k], T());
  }
}

template <class T, class V, int kNumStates>
TORCHFUSE_INLINE void store_states(const Streams& streams, std::int64_t index,
                                   const V (&state)[kNumStates]) {
#pragma GCC unroll 4
  for (int k = 0; k < kNumStates; ++k) {
    if (streams.state[k] != nullptr) {
      store(streams.state[k], index, streams.state_dtype[k], state[k], T());
    }
  }
}

/// Updates one vector of elements at `index`.
template <class Functor, class T>
TORCHFUSE_INLINE void update_vector(const Streams& streams, std::int64_t index,
                                    const typename Functor::template Coefs<T>& coefs, T grad_coef) {
  using V = typename Simd<T>::V;
  V param = load_value(streams, index, T());
  V grad(T(0));
  if constexpr (!kStatesInMeasure<Functor>) {
    grad = load(streams.grad, index, streams.grad_dtype, T()) * V(grad_coef);
  }
  V state[Functor::kNumStates];
  load_states<T>(streams, index, state);
  Functor::update(param, grad, state, coefs);
  if constexpr (!kStatesInMeasure<Functor>) store_states<T>(streams, index, state);
  store_value(streams, index, param, T());
  if (streams.write_back) store(streams.grad, index, streams.grad_dtype, grad, T());
}

TORCHFUSE_INLINE void copy_bytes(void* to, const void* from, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; ++i) {
    static_cast<char*>(to)[i] = static_cast<const char*>(from)[i];
  }
}

/// A stretch shorter than a vector goes through the same vector code on zero-filled copies, so that
/// every element is computed by the same instructions wherever ranges are split.
template <class Functor, class T>
void update_tail(const Streams& streams, std::int64_t begin, std::int64_t count,
                 const typename Functor::template Coefs<T>& coefs, T grad_coef) {
  constexpr std::int64_t kBytes = 64;
  alignas(64) char buffer[4 + kMaxStates][kBytes] = {};
  Streams local = streams;
  local.first = begin;
  const auto fetch = [&](char* slot, const void* stream, DType dtype) {
    const std::int64_t size = static_cast<std::int64_t>(size_of(dtype));
    copy_bytes(slot, static_cast<const char*>(stream) + begin * size, count * size);
  };
  const auto put_back = [&](void* stream, const char* slot, DType dtype) {
    const std::int64_t size = static_cast<std::int64_t>(size_of(dtype));
    copy_bytes(static_cast<char*>(stream) + begin * size, slot, count * size);
  };
  fetch(buffer[0], streams.param_in, streams.param_in_dtype);
  fetch(buffer[1], streams.grad, streams.grad_dtype);
  local.param_in = buffer[0];
  local.grad = buffer[1];
  local.param = buffer[2];
  if (streams.master != nullptr) local.master = buffer[3];
  if (streams.remainder != nullptr) {
    fetch(buffer[3], streams.remainder, DType::kBFloat16);
    local.remainder = reinterpret_cast<std::int16_t*>(buffer[3]);
  }
  for (int k = 0; k < Functor::kNumStates; ++k) {
    if (streams.state[k] == nullptr) continue;
    fetch(buffer[4 + k], streams.state[k], streams.state_dtype[k]);
    local.state[k] = buffer[4 + k];
  }
  update_vector<Functor, T>(local, 0, coefs, grad_coef);
  put_back(streams.param, buffer[2], streams.param_dtype);
  if (streams.master != nullptr) put_back(streams.master, buffer[3], DType::kFloat32);
  if (streams.remainder != nullptr) put_back(streams.remainder, buffer[3], DType::kBFloat16);
  if (streams.write_back) put_back(streams.grad, buffer[1], streams.grad_dtype);
  if constexpr (kStatesInMeasure<Functor>) return;
  for (int k = 0; k < Functor::kNumStates; ++k) {
    if (streams.state[k] == nullptr) continue;
    put_back(streams.state[k], buffer[4 + k], streams.state_dtype[k]);
  }
}

/// Whole vectors of one tensor, then the rest.
template <class Functor, class T>
TORCHFUSE_INLINE void update_stretch(const Streams& streams, std::int64_t begin, std::int64_t end,
                                     const typename Functor::template Coefs<T>& coefs,
                                     T grad_coef) {
  constexpr std::int64_t kWidth = Simd<T>::kWidth;
  std::int64_t i = begin;
  for (; i + kWidth <= end; i += kWidth) {
    const auto ahead = [&](const void* stream, DType dtype) {
      if (stream != nullptr) {
        prefetch(stream, i * static_cast<std::int64_t>(size_of(dtype)) + kPrefetchBytes);
      }
    };
    ahead(streams.param_in, streams.param_in_dtype);
    ahead(streams.remainder, DType::kBFloat16);
    if (!kStatesInMeasure<Functor>) ahead(streams.grad, streams.grad_dtype);
    for (int k = 0; k < Functor::kNumStates; ++k) ahead(streams.state[k], streams.state_dtype[k]);
    update_vector<Functor, T>(streams, i, coefs, grad_coef);
  }
  if (i < end) update_tail<Functor, T>(streams, i, end - i, coefs, grad_coef);
}

/// Elements [begin, end) of one tensor. Where all streams are bf16 the arithmetic is the
/// limit, not memory: telling the compiler so takes the type branches out of the loop.
template <class Functor, class T>
TORCHFUSE_INLINE void update_tensor(const Streams& streams, std::int64_t begin, std::int64_t end,
                                    const typename Functor::template Coefs<T>& coefs, T grad_coef) {
  const DType bf16 = DType::kBFloat16;
  bool all_bf16 = streams.param_in_dtype == bf16 && streams.param_dtype == bf16 &&
                  streams.grad_dtype == bf16 && streams.remainder == nullptr &&
                  !streams.stochastic && !streams.write_back;
  for (int k = 0; k < Functor::kNumStates; ++k) {
    all_bf16 = all_bf16 && (streams.state[k] == nullptr || streams.state_dtype[k] == bf16);
  }
  if (all_bf16) {
    Streams known = streams;
    known.param_in_dtype = known.param_dtype = known.grad_dtype = bf16;
    for (int k = 0; k < Functor::kNumStates; ++k) known.state_dtype[k] = bf16;
    known.master = nullptr;
    known.remainder = nullptr;
    known.stochastic = false;
    known.write_back = false;
    update_stretch<Functor, T>(known, begin, end, coefs, grad_coef);
  } else {
    update_stretch<Functor, T>(streams, begin, end, coefs, grad_coef);
  }
}

template <class Functor>
TORCHFUSE_INLINE Streams make_streams(const UpdateArgs<Functor>& args, const TensorRow& row) {
  const TensorTable& table = args.tensors;
  Streams streams{};
  streams.param_in = table.has_master ? row.master : row.param;
  streams.param_in_dtype = table.has_master ? DType::kFloat32 : table.param;
  streams.param = row.param;
  streams.param_dtype = table.param;
  streams.master = table.has_master ? row.master : nullptr;
  streams.remainder = table.has_remainder ? static_cast<std::int16_t*>(row.master) : nullptr;
  streams.grad = row.grad;
  streams.grad_dtype = table.grad;
  streams.write_back = args.write_back_grads && !kStatesInMeasure<Functor>;
  streams.stochastic = table.stochastic;
  if (table.stochastic) {
    streams.rounding = rounding_key(table.seed, static_cast<std::uint64_t>(row.index),
                                    static_cast<std::uint64_t>(*row.step));
  }
  for (int k = 0; k < Functor::kNumStates; ++k) {
    const bool used = Functor::uses_state(args.groups[row.group], k);
    streams.state[k] = used ? row.state[k] : nullptr;
    streams.state_dtype[k] = table.state[k];
  }
  return streams;
}

/// The first cache lines of a tensor that comes soon. Within a tensor the hardware sees the
/// streams; a list of small ones would wait for memory at each.
TORCHFUSE_INLINE void prefetch_start(const TensorTable& table, std::int64_t t) {
  constexpr std::int64_t kAhead = 2;
  constexpr std::int64_t kBytes = 256;
  if (t + kAhead >= table.count) return;
  const TensorRow& row = table.rows[t + kAhead];
  for (std::int64_t line = 0; line < kBytes; line += 64) {
    prefetch(table.has_master ? row.master : row.param, line);
    prefetch(row.grad, line);
    for (int k = 0; k < kMaxStates; ++k) {
      if (row.state[k] != nullptr) prefetch(row.state[k], line);
    }
  }
}

template <class Functor, class T>
TORCHFUSE_INLINE void update_elements(const UpdateArgs<Functor>& args, std::int64_t begin,
                                      std::int64_t end) {
  const TensorTable& table = args.tensors;
  const T grad_coef = round_to<T>(args.scalars->grad_coef);
  typename Functor::template Coefs<T> coefs{};
  // Most tensors share group and step count; their coefficients are computed once.
  std::int32_t coefs_group = -1;
  float coefs_step = 0.0f;
  for (std::int64_t t = find_row(table.offsets, table.count, begin); begin < end; ++t) {
    const TensorRow& row = table.rows[t];
    const std::int64_t stop = table.offsets[t + 1] < end ? table.offsets[t + 1] : end;
    if (stop == begin) continue;
    prefetch_start(table, t);
    const typename Functor::Params& params = args.groups[row.group];
    if (row.group != coefs_group || *row.step != coefs_step) {
      coefs_group = row.group;
      coefs_step = *row.step;
      coefs = Functor::template prepare<T>(params, static_cast<double>(*row.step));
    }
    if constexpr (Layerwise<Functor>) {
      Functor::apply_norms(params, args.norms + t * Functor::kNumNorms, coefs);
    }
    update_tensor<Functor, T>(make_streams(args, row), begin - table.offsets[t],
                              stop - table.offsets[t], coefs, grad_coef);
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
