// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torchfuse/export.h>
#include <torchfuse/optim/fused_optimizer.h>

namespace torchfuse::optim {

/// A class of fused optimizers, for programs that choose one by name, and for programs that read or
/// write its archives without an optimizer, as Python's `torchfuse.convert` does.
///
/// An archive holds `format`, `group_count` and, for every group, a nested archive `group/<i>` with
/// `options`, `param_count` and, for every parameter that has a state, `state/<i>`: `step`, the
/// states of the class, and `master_param` or `param_remainder` if there is one.
struct OptimizerClass {
  std::string name;                 ///< such as "FusedAdam"
  std::string algorithm;            ///< name of the algorithm for FusedStep
  std::string archive_format;       ///< value of `format` in the archives of this class
  std::vector<std::string> states;  ///< names of all states that a parameter may have
  /// Constructs an optimizer of these groups with default options.
  std::function<std::unique_ptr<FusedOptimizer>(
      const std::vector<torch::optim::OptimizerParamGroup>&)>
      make;
  /// Writes the defaults of all options of a group.
  std::function<void(torch::serialize::OutputArchive&)> write_default_options;
  /// Returns the states that every parameter of a group with these options has. Throws, naming the
  /// second argument and the option, if an option is missing, of another type or out of range.
  std::function<std::vector<std::string>(torch::serialize::InputArchive&, const std::string&)>
      required_states;
};

/// Returns all optimizer classes of torchfuse, sorted by name.
TORCHFUSE_API std::vector<OptimizerClass> optimizer_classes();

}  // namespace torchfuse::optim
