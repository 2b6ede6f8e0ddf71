// SPDX-License-Identifier: BSD-3-Clause
// A tensor's operands in the CPU drivers, and copies of operands that are shorter than a vector.
#pragma once

#include <cstring>

#include "kernels/cpu/prefetch.h"
#include "kernels/cpu/simd.h"
#include "kernels/fused_optimizer.h"

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

/// A tensor's operands, with their storage types.
struct Operands {
  const void* param_in;  ///< the master if there is one
  void* param;
  void* master;
  std::int16_t* remainder;
  void* grad;
  void* state[kMaxStates];
  DType param_in_dtype;
  DType param_dtype;
  DType grad_dtype;
  DType state_dtype[kMaxStates];
  void* ema;
  DType ema_dtype;
  EmaCoefs<double> ema_coefs;  ///< rounded to the compute type
  bool write_back;
  bool stochastic;
  RoundingKey rounding;
  std::int64_t first;  ///< the first element's number in the full parameter
  Ahead ahead;
};

/// Sets the parameter's average, if there is one.
TORCHFUSE_INLINE void set_ema(const TensorTable& table, const TensorRow& row, Operands& operands) {
  if (!table.has_ema) return;
  const double step = static_cast<double>(*row.step);
  operands.ema = row.ema;
  operands.ema_dtype = table.param == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  operands.ema_coefs = ema_coefs<double>(table.ema, step);
  if (table.param == DType::kFloat64) return;
  operands.ema_coefs.weight = static_cast<double>(ema_coefs<float>(table.ema, step).weight);
}

template <class Functor>
TORCHFUSE_INLINE Operands operands_of(const UpdateArgs<Functor>& args, const TensorRow& row) {
  const TensorTable& table = args.tensors;
  Operands operands{};
  operands.param_in = table.has_master ? row.master : row.param;
  operands.param_in_dtype = table.has_master ? DType::kFloat32 : table.param;
  operands.param = row.param;
  operands.param_dtype = table.param;
  operands.master = table.has_master ? row.master : nullptr;
  operands.remainder = table.has_remainder ? static_cast<std::int16_t*>(row.master) : nullptr;
  operands.grad = row.grad;
  operands.grad_dtype = table.grad;
  operands.write_back = args.write_back_grads && !kStatesInMeasure<Functor>;
  set_ema(table, row, operands);
  operands.stochastic = table.stochastic;
  if (table.stochastic) {
    operands.rounding = rounding_key(table.seed, static_cast<std::uint64_t>(row.index),
                                     static_cast<std::uint64_t>(*row.step));
    operands.first = row.numbers.first;
  }
  std::size_t bytes = size_of(operands.param_in_dtype) + size_of(table.grad);
  for (int k = 0; k < Functor::kNumStates; ++k) {
    const bool used = Functor::uses_state(args.groups[row.group], k);
    operands.state[k] = used ? row.state[k] : nullptr;
    operands.state_dtype[k] = table.state[k];
    if (used) bytes += size_of(table.state[k]);
  }
  operands.ahead = ahead_of(table, row, static_cast<std::int64_t>(bytes),
                            static_cast<std::int64_t>(size_of(operands.param_in_dtype)));
  return operands;
}

template <std::size_t kSize>
TORCHFUSE_INLINE void copy_block(char*& to, const char*& from) {
  memcpy(to, from, kSize);
  to += kSize;
  from += kSize;
}

/// Copies an even number of bytes; every storage type's size is even.
TORCHFUSE_INLINE void copy_bytes(void* to, const void* from, std::int64_t bytes) {
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  for (std::int64_t left = bytes; left >= 16; left -= 16) copy_block<16>(target, source);
  if ((bytes & 8) != 0) copy_block<8>(target, source);
  if ((bytes & 4) != 0) copy_block<4>(target, source);
  if ((bytes & 2) != 0) copy_block<2>(target, source);
}

/// Zero-filled copies of a range that is shorter than a vector. The copies go through the same
/// vector code, so that every element is computed by the same instructions wherever ranges are
/// split.
template <int kNumStates, std::int64_t kBytes>
struct TailCopy {
  static constexpr int kEmaPlace = 4 + kMaxStates;
  alignas(64) char memory[kEmaPlace + 1][kBytes] = {};
  const Operands& whole;
  std::int64_t begin;
  std::int64_t count;
  Operands operands;  ///< the copies

  TORCHFUSE_INLINE TailCopy(const Operands& all, std::int64_t first, std::int64_t elements)
      : whole(all), begin(first), count(elements), operands(all) {
    operands.first += begin;
    fetch(0, whole.param_in, whole.param_in_dtype);
    fetch(1, whole.grad, whole.grad_dtype);
    operands.param_in = memory[0];
    operands.grad = memory[1];
    operands.param = memory[2];
    if (whole.master != nullptr) operands.master = memory[3];
    if (whole.remainder != nullptr) {
      fetch(3, whole.remainder, DType::kBFloat16);
      operands.remainder = reinterpret_cast<std::int16_t*>(memory[3]);
    }
    if (whole.ema != nullptr) {
      fetch(kEmaPlace, whole.ema, whole.ema_dtype);
      operands.ema = memory[kEmaPlace];
    }
    for (int k = 0; k < kNumStates; ++k) {
      if (whole.state[k] == nullptr) continue;
      fetch(4 + k, whole.state[k], whole.state_dtype[k]);
      operands.state[k] = memory[4 + k];
    }
  }

  TORCHFUSE_INLINE void fetch(int place, const void* operand, DType dtype) {
    const std::int64_t size = static_cast<std::int64_t>(size_of(dtype));
    copy_bytes(memory[place], static_cast<const char*>(operand) + begin * size, count * size);
  }
  TORCHFUSE_INLINE void put_back(int place, void* operand, DType dtype) {
    const std::int64_t size = static_cast<std::int64_t>(size_of(dtype));
    copy_bytes(static_cast<char*>(operand) + begin * size, memory[place], count * size);
  }
  TORCHFUSE_INLINE void put_back_source() {
    put_back(2, whole.param, whole.param_dtype);
    if (whole.master != nullptr) put_back(3, whole.master, DType::kFloat32);
    if (whole.remainder != nullptr) put_back(3, whole.remainder, DType::kBFloat16);
    if (whole.ema != nullptr) put_back(kEmaPlace, whole.ema, whole.ema_dtype);
  }
  TORCHFUSE_INLINE void put_back_states() {
    if (whole.write_back) put_back(1, whole.grad, whole.grad_dtype);
    for (int k = 0; k < kNumStates; ++k) {
      if (whole.state[k] != nullptr) put_back(4 + k, whole.state[k], whole.state_dtype[k]);
    }
  }
};

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
