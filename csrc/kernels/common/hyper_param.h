// SPDX-License-Identifier: BSD-3-Clause
// A hyper-parameter that a kernel reads, by value or through a pointer. With a pointer, a schedule
// on the device, or a fill_ between replays of a captured graph, takes effect without a new launch
// setup.
#pragma once

#include <limits>

#include "kernels/common/dtype.h"

namespace torchfuse::kernels {

struct ScalarParam {
  double value = 0.0;
  const void* pointer = nullptr;  ///< one float or double on the launch's device, or null
  DType dtype = DType::kFloat32;  ///< type behind `pointer`: kFloat32 or kFloat64

  TORCHFUSE_HOST_DEVICE double load() const {
    if (pointer == nullptr) return value;
    if (dtype == DType::kFloat64) return *static_cast<const double*>(pointer);
    return static_cast<double>(*static_cast<const float*>(pointer));
  }
};

/// The allowed range of a hyper-parameter: at least `low` and less than `high`. NaN is never
/// allowed.
struct HyperParamRange {
  double low = 0.0;
  double high = std::numeric_limits<double>::infinity();
  bool may_be_infinite = false;
  bool at_least_previous = false;  ///< must also be at least the preceding hyper-parameter
  bool on_host = false;            ///< never a tensor, because the host needs the value
};
inline constexpr HyperParamRange kNonNegative{};
inline constexpr HyperParamRange kDecayRate{.high = 1.0};

/// A number with a range, or a flag, in an optimizer's hyper-parameter table. The table is next to
/// the optimizer's formula, in the order of the op's schema. Everything else is derived from the
/// table.
template <class Params>
struct HyperParamEntry {
  // The types have names because nvcc writes declarations of pointers to members with parentheses.
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
