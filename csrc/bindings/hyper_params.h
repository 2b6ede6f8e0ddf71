// SPDX-License-Identifier: BSD-3-Clause
// Reads hyper-parameters (numbers and 1-element tensors) from Python's parameter groups.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <string>
#include <vector>

#include <torchfuse/hyper_params.h>

namespace torchfuse::bindings {

namespace py = pybind11;

/// Reads and checks the groups' values. Messages name each value's place in the group.
class HyperParamReader {
 public:
  /// @param places each hyper-parameter's place in a group, such as "betas[0]"; if the list is
  ///   shorter than the table, names in the table are used.
  HyperParamReader(const std::string& algorithm, const std::vector<std::string>& places);

  /// Replaces `result` with one group's values, in the table's order. Host tensors become numbers,
  /// device tensors become 0-dim tensors.
  /// @param caller beginning of messages.
  /// @param read_devices also check device tensors, which synchronizes the host.
  /// @throws c10::TypeError if a value is not a number; c10::ValueError if it is out of range.
  void read(py::handle values, const std::string& caller, std::size_t group, bool read_devices,
            std::vector<HyperParam>& result) const;

 private:
  std::vector<HyperParamInfo> table_;
};

/// Returns a number, or a 0-dim fp32 or fp64 tensor. Does not read tensors, not even on the host.
/// Messages begin with `expected`. A tensor must have one element and a floating dtype.
HyperParam number_or_tensor(py::handle value, const std::string& expected);

/// Checks a number against a hyper-parameter's range. Messages begin with `expected`.
void check_hyper_param(const std::string& algorithm, const std::string& name, py::handle value,
                       const std::string& expected);

}  // namespace torchfuse::bindings
