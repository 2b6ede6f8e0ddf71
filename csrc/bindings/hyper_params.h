// SPDX-License-Identifier: BSD-3-Clause
// Hyper-parameters as Python's groups hold them: numbers, and tensors of one element.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <string>
#include <vector>

#include <torchfuse/hyper_params.h>

namespace torchfuse::bindings {

namespace py = pybind11;

/// Reads and checks the values of groups; messages have the names by which the program knows them.
class HyperParamReader {
 public:
  /// @param places for each hyper-parameter where a group holds it, such as "betas[0]"; none: its
  ///   name in the table.
  HyperParamReader(const std::string& algorithm, const std::vector<std::string>& places);

  /// Replaces `result` by the values of one group, in the order of the table: numbers as they are,
  /// a tensor of the host as the number that it holds, and another tensor as a 0-dim one.
  /// @param caller begins a message.
  /// @param read_devices also check, and wait for, numbers that lie on a device.
  /// @throws c10::ValueError, c10::TypeError for what is no number, or is out of range.
  void read(py::handle values, const std::string& caller, std::size_t group, bool read_devices,
            std::vector<HyperParam>& result) const;

 private:
  std::vector<HyperParamInfo> table_;
};

/// Returns a number, or a 0-dim tensor of fp32 or fp64 whose value is not read, on the host either.
/// `expected` begins a message; a tensor has one element of a floating dtype.
HyperParam number_or_tensor(py::handle value, const std::string& expected);

/// Checks one number by the range of a hyper-parameter. `expected` begins a message.
void check_hyper_param(const std::string& algorithm, const std::string& name, py::handle value,
                       const std::string& expected);

}  // namespace torchfuse::bindings
