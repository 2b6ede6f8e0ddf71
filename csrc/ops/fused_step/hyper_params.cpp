// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/hyper_params.h>

#include <c10/util/StringUtil.h>

#include <cmath>
#include <limits>

#include "ops/fused_step/algorithm.h"

namespace torchfuse {

// Written so that a NaN violates every range.
std::optional<std::string> HyperParamInfo::violation(double value, double least) const {
  if (is_flag) return std::nullopt;
  const std::string none = may_be_infinite ? "none or " : "";
  const bool infinite = may_be_infinite && std::isinf(value) && value > 0.0;
  if (value >= low && (value < high || infinite)) {
    if (at_least.empty() || value >= least) return std::nullopt;
    return c10::str(none, "at least ", at_least, ", ", least);
  }
  if (low == std::numeric_limits<double>::lowest()) return "finite";
  std::string expected = c10::str(none, "at least ", low);
  if (std::isfinite(high)) expected += c10::str(" and less than ", high);
  if (std::isinf(high) && !may_be_infinite) expected += " and finite";
  return expected;
}

const std::vector<HyperParamInfo>& hyper_params_of(const std::string& algorithm) {
  return ops::make_algorithm(algorithm)->hyper_params();  // the list is static
}

}  // namespace torchfuse
