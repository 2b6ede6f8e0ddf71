// SPDX-License-Identifier: BSD-3-Clause
// A hyper-parameter that a kernel reads: by value, or through a pointer so that a schedule on the
// device (or a fill_ between replays of a captured graph) is seen without a new launch setup.
#pragma once

#include <limits>

#include "kernels/common/dtype.h"

namespace torchfuse::kernels {

struct ScalarParam {
  double value = 0.0;
  const void* pointer = nullptr;  ///< one float or double on the launch's device, or null
  DType dtype = DType::kFloat32;  ///< of `pointer`: kFloat32 or kFloat64

  TORCHFUSE_HOST_DEVICE double load() const {
    if (pointer == nullptr) return value;
    if (dtype == DType::kFloat64) return *static_cast<const double*>(pointer);
    return static_cast<double>(*static_cast<const float*>(pointer));
  }
};

/// The numbers that a hyper-parameter may be: at least `low` and below `high`. Nothing is NaN.
struct HyperParamRange {
  double low = 0.0;
  double high = std::numeric_limits<double>::infinity();
  bool may_be_infinite = false;
  bool at_least_previous = false;  ///< and not below the hyper-parameter before it
};
inline constexpr HyperParamRange kNonNegative{};
inline constexpr HyperParamRange kDecayRate{.high = 1.0};

/// One line of an optimizer's table of hyper-parameters, which stands beside its formula in the
/// order of its op's schema: a number with its range, or a flag. All else follows from it.
template <class Params>
struct HyperParamEntry {
  // Names for the types: nvcc writes declarations of pointers to members with parentheses.
  using Number = ScalarParam Params::*;
  using Flag = bool Params::*;

  constexpr HyperParamEntry(const char* name, Number number, HyperParamRange range = kNonNegative)
      : name(name), number(number), range(range) {}
  constexpr HyperParamEntry(const char* name, Flag flag) : name(name), flag(flag) {}

  const char* name;
  Number number = nullptr;
  Flag flag = nullptr;
  HyperParamRange range;
};

}  // namespace torchfuse::kernels
