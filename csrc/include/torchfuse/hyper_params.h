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

/// A hyper-parameter's value: a number (0 or 1 for a flag), or a 0-dim fp32 or fp64 tensor, which
/// the kernels read on the device.
using HyperParam = std::variant<double, at::Tensor>;

/// Name and valid range of one hyper-parameter of a FusedStep algorithm.
struct TORCHFUSE_API HyperParamInfo {
  std::string name;              ///< name in the op's schema, such as "beta1"
  bool is_flag = false;          ///< 0 or 1; a flag ignores the other fields
  double low = 0.0;              ///< smallest valid value
  double high = 0.0;             ///< valid values are less than this
  bool may_be_infinite = false;  ///< whether infinity is also valid
  std::string at_least;          ///< another hyper-parameter that is a lower bound, or empty
  bool on_host = false;          ///< never a tensor, because the host needs the value

  /// Returns the condition that `value` violates, such as "at least 0 and less than 1", or
  /// `nullopt` if `value` is valid.
  /// @param value the value to check.
  /// @param least value of the hyper-parameter that `at_least` names (default: no lower bound).
  std::optional<std::string> violation(
      double value, double least = -std::numeric_limits<double>::infinity()) const;
};

/// Returns an algorithm's hyper-parameters, in the order of its op's schema and of
/// FusedStep::step().
/// @param algorithm name of a registered update, such as "adam".
/// @throws c10::Error for an unknown name.
TORCHFUSE_API const std::vector<HyperParamInfo>& hyper_params_of(const std::string& algorithm);

}  // namespace torchfuse
