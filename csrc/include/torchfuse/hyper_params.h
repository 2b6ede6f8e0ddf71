// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <limits>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include <torchfuse/export.h>

namespace torchfuse {

/// The value of a hyper-parameter: a number (flags are 0 or 1), or a 0-dim fp32 or fp64 tensor that
/// the kernels read on the device.
using HyperParam = std::variant<double, at::Tensor>;

/// A hyper-parameter of an algorithm that FusedStep knows, and the numbers that it may be.
struct TORCHFUSE_API HyperParamInfo {
  std::string name;              ///< as in the op's schema: "beta1"
  bool is_flag = false;          ///< 0 or 1; what follows is for the others
  double low = 0.0;              ///< the least value
  double high = 0.0;             ///< values are below it
  bool may_be_infinite = false;  ///< infinity is a value, too
  std::string at_least;          ///< the hyper-parameter that it must not be below, or empty

  /// What it has to be, where `value` is not: "at least 0 and less than 1". None: `value` will do.
  /// `least` is the value of the hyper-parameter `at_least`.
  std::optional<std::string> violation(
      double value, double least = -std::numeric_limits<double>::infinity()) const;
};

/// The hyper-parameters of an algorithm such as "adam", in the order of its op's schema and of
/// FusedStep::step(); throws on any other name.
TORCHFUSE_API const std::vector<HyperParamInfo>& hyper_params_of(const std::string& algorithm);

}  // namespace torchfuse
