// SPDX-License-Identifier: BSD-3-Clause
// Common code for rates of all groups, and argument checks of the schedulers.
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "api/optim/lr_scheduler/state_values.h"

namespace torchfuse::optim {

/// Applies `formula` to each rate.
template <class Formula>
std::vector<double> each(std::vector<double> rates, const Formula& formula) {
  for (double& rate : rates) rate = formula(rate);
  return rates;
}

/// Returns 0 for a rate that only rounding made negative, as at the end of a linear decay to 0,
/// because optimizers reject negative rates. Rounding errors are relative to `scale` and grow with
/// the step count.
inline double without_rounding_below_zero(double rate, double scale) {
  constexpr double kRounding = 1e-6;
  return rate < 0.0 && rate >= -kRounding * scale ? 0.0 : rate;
}

inline bool is_fraction(double value) { return value >= 0.0 && value <= 1.0; }
inline bool is_positive_fraction(double value) { return value > 0.0 && value <= 1.0; }
inline bool is_below_one(double value) { return value >= 0.0 && value < 1.0; }
inline bool is_positive(double value) { return std::isfinite(value) && value > 0.0; }
inline constexpr const char* kFractionRange = "from 0 to 1";
inline constexpr const char* kPositiveFractionRange = "greater than 0 and at most 1";
inline constexpr const char* kBelowOneRange = "at least 0 and less than 1";

/// Throws unless `valid` returns true; `range` describes valid values.
inline void check_number(const char* owner, const char* option, double value, const char* range,
                         bool (*valid)(double)) {
  TORCH_CHECK_VALUE(valid(value), owner, ": expected ", option, " to be ", range, ", got ", value,
                    ".");
}

inline void check_rate(const char* owner, const char* option, double value) {
  check_number(owner, option, value, kRateRange, &is_rate);
}

inline void check_count(const char* owner, const char* option, std::int64_t value,
                        std::int64_t at_least = 1) {
  TORCH_CHECK_VALUE(value >= at_least, owner, ": expected ", option, " to be at least ", at_least,
                    ", got ", value, ".");
}

inline void check_choice(const char* owner, const char* option, const std::string& value,
                         const std::vector<std::string>& choices) {
  const bool known = std::find(choices.begin(), choices.end(), value) != choices.end();
  TORCH_CHECK_VALUE(known, owner, ": expected ", option, " to be one of ", c10::Join(", ", choices),
                    ", got ", value, ".");
}

}  // namespace torchfuse::optim
