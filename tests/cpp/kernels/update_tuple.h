// SPDX-License-Identifier: BSD-3-Clause
// The operands of an update and their dtypes: which tuples the tests of the kernels go through.
#pragma once

#include <algorithm>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "kernel_test.h"
#include "kernels/cuda/typed_tuples.h"

namespace torchfuse::kernels::testing {

/// The operands of a tensor.
enum Part : int { kParam, kGrad, kFirst, kSecond, kMaximum, kMaster, kEma, kParts };

inline const char* name_of(Part part) {
  constexpr const char* kNames[kParts] = {"param",          "grad",   "exp_avg", "exp_avg_sq",
                                          "max_exp_avg_sq", "master", "ema"};
  return kNames[part];
}

inline void*& pointer_of(TensorRow& row, Part part) {
  if (part == kParam) return row.param;
  if (part == kGrad) return row.grad;
  if (part == kEma) return row.ema;
  return part == kMaster ? row.master : row.state[part - kFirst];
}

struct UpdateTuple {
  DType param = DType::kFloat32;
  DType grad = DType::kFloat32;
  DType state = DType::kFloat32;
  bool has_master = false;
  std::optional<DType> square = {};  ///< of the second and third state, where it is another

  bool has_remainder = false;  ///< in the place of the master
  bool stochastic = false;     ///< parameters are rounded at random
  bool has_ema = false;        ///< averages of the parameters are moved too

  bool keeps_master() const { return has_master || has_remainder; }

  /// A remainder's 16 bits are taken for a bf16: any are a remainder.
  DType dtype(Part part) const {
    if (part == kParam) return param;
    if (part == kGrad) return grad;
    if (part == kMaster) return has_remainder ? DType::kBFloat16 : DType::kFloat32;
    if (part == kEma) return param == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    return part == kFirst ? state : square.value_or(state);
  }

  /// The dtypes, without rows.
  TensorTable table() const {
    TensorTable table;
    table.param = param;
    table.grad = grad;
    for (const Part part : {kFirst, kSecond, kMaximum}) table.state[part - kFirst] = dtype(part);
    table.has_master = has_master;
    table.has_remainder = has_remainder;
    table.stochastic = stochastic;
    table.seed = 0x123456789abcdef;
    table.has_ema = has_ema;
    table.ema = {0.999, 2.0, true};  // copies, warms up or averages, by the tensor's step
    return table;
  }

  /// Elements per vector: 16 bytes of the narrowest operand, or of a 16-bit one where types are
  /// looked up as the kernel runs.
  std::int64_t vec() const {
    const TensorTable looked_up = table();
    if (!(has_ema ? has_typed_ema_kernel(looked_up, 3) : has_typed_kernel(looked_up, 3))) return 8;
    return 16 /
           static_cast<std::int64_t>(std::min({size_of(param), size_of(grad), size_of(state)}));
  }

  std::string name() const {
    constexpr const char* kNames[] = {"Fp32", "Fp16", "Bf16", "Fp64"};
    std::string text;
    for (const DType dtype : {param, grad, state}) text += kNames[static_cast<int>(dtype)];
    if (square) text += kNames[static_cast<int>(*square)];
    text += has_master ? "Master" : has_remainder ? "Remainder" : stochastic ? "Stochastic" : "";
    return text + (has_ema ? "Ema" : "");
  }
};

inline void PrintTo(const UpdateTuple& tuple, std::ostream* out) { *out << tuple.name(); }

/// All tuples with states of one dtype for which this holds.
template <class Condition>
std::vector<UpdateTuple> tuples_where(Condition condition) {
  std::vector<UpdateTuple> tuples;
  for (const DType param : kEveryDType) {
    for (const DType grad : kEveryDType) {
      for (const DType state : kEveryDType) {
        for (const bool master : {false, true}) {
          const UpdateTuple tuple{param, grad, state, master, {}};
          if (condition(tuple.table())) tuples.push_back(tuple);
        }
      }
    }
  }
  return tuples;
}

/// The tuples that have a kernel of their own.
inline std::vector<UpdateTuple> own_tuples() {
  return tuples_where([](const TensorTable& table) { return has_typed_kernel(table, 3); });
}

/// Some of those that do not, with every storage type in every place.
inline std::vector<UpdateTuple> mixed_tuples() {
  constexpr DType kFp32 = DType::kFloat32, kFp16 = DType::kFloat16, kBf16 = DType::kBFloat16;
  return {{kFp32, kFp32, kBf16, false, {}},
          {kFp32, kFp16, kFp32, false, kBf16},
          {kBf16, kBf16, kFp32, true, kBf16},
          {kBf16, kFp32, kFp16, false, kFp32},
          {kFp16, kFp16, kBf16, false, kFp16},
          {kFp16, kBf16, kFp16, true, {}},
          {kBf16, kBf16, kFp32, false, {}, true},
          {kBf16, kFp32, kBf16, false, kFp16, true},
          {kBf16, kBf16, kFp32, false, {}, false, true}};
}

/// Those with averages: the ones that have a kernel of their own, and some of the others.
inline std::vector<UpdateTuple> ema_tuples() {
  std::vector<UpdateTuple> tuples =
      tuples_where([](const TensorTable& table) { return has_typed_ema_kernel(table, 3); });
  tuples.push_back({DType::kFloat32, DType::kFloat16, DType::kFloat32});
  tuples.push_back({DType::kBFloat16, DType::kFloat32, DType::kFloat32, true});
  tuples.push_back({DType::kFloat16, DType::kFloat16, DType::kFloat32});
  for (const UpdateTuple& tuple : mixed_tuples()) {
    if (tuple.has_remainder || tuple.stochastic) tuples.push_back(tuple);
  }
  for (UpdateTuple& tuple : tuples) tuple.has_ema = true;
  return tuples;
}

inline std::vector<UpdateTuple> update_tuples() {
  std::vector<UpdateTuple> tuples = own_tuples();
  for (const auto& others : {mixed_tuples(), ema_tuples()}) {
    tuples.insert(tuples.end(), others.begin(), others.end());
  }
  return tuples;
}

}  // namespace torchfuse::kernels::testing
