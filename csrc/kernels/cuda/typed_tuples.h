// SPDX-License-Identifier: BSD-3-Clause
// Determines which kernel updates a table on CUDA.
#pragma once

#include "kernels/common/dtype.h"
#include "kernels/common/tensor_table.h"

namespace torchfuse::kernels {

/// The dtype tuples that have a separate update kernel. All states have one dtype:
///
///   param      grad                     state            master
///   fp32       fp32, fp16, bf16         fp32             -
///   fp16       fp16, fp32               fp32             optional, fp32
///   fp16       fp16, fp32               fp16             -
///   bf16       bf16, fp32               fp32             optional, fp32
///   bf16       bf16, fp32               bf16             -
///   fp64       fp64                     fp64             -
constexpr bool has_typed_kernel(DType param, DType grad, DType state, bool has_master) {
  if (param == DType::kFloat64) {
    return grad == DType::kFloat64 && state == DType::kFloat64 && !has_master;
  }
  if (grad == DType::kFloat64 || state == DType::kFloat64) return false;
  if (param == DType::kFloat32) return state == DType::kFloat32 && !has_master;
  const bool grad_fits = grad == param || grad == DType::kFloat32;
  const bool state_fits = state == DType::kFloat32 || (state == param && !has_master);
  return grad_fits && state_fits;
}

/// Like the overload above, for a table whose functor has `num_states` states.
constexpr bool has_typed_kernel(const TensorTable& table, int num_states) {
  if (table.has_remainder || table.stochastic) return false;
  for (int k = 1; k < num_states; ++k) {
    if (table.state[k] != table.state[0]) return false;
  }
  const DType state = num_states == 0 ? DType::kFloat32 : table.state[0];
  return has_typed_kernel(table.param, table.grad, state, table.has_master);
}

/// Returns whether the tuple also has a separate kernel for updates with averages: gradients have
/// the parameter's dtype, and 16-bit parameters have masters.
constexpr bool has_typed_ema_kernel(const TensorTable& table, int num_states) {
  return has_typed_kernel(table, num_states) && table.grad == table.param &&
         table.has_master == (size_of(table.param) == 2);
}

/// Returns whether the kernel that looks types up at run time supports the table: any table without
/// fp64. Masters require 16-bit parameters, remainders require bf16, and only parameters without
/// either may be rounded stochastically.
constexpr bool has_looked_up_kernel(const TensorTable& table, int num_states) {
  bool wide = table.param == DType::kFloat64 || table.grad == DType::kFloat64;
  for (int k = 0; k < num_states; ++k) wide = wide || table.state[k] == DType::kFloat64;
  const bool master_fits = !table.has_master || size_of(table.param) == 2;
  const bool remainder_fits =
      !table.has_remainder || (table.param == DType::kBFloat16 && !table.has_master);
  const bool rounding_fits = !table.stochastic || (table.param == DType::kBFloat16 &&
                                                   !table.has_master && !table.has_remainder);
  return !wide && master_fits && remainder_fits && rounding_fits;
}

}  // namespace torchfuse::kernels
