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

/// A class of fused optimizers, for programs that choose one by its name, and for those that read
/// or write its archives without an optimizer, as Python's `torchfuse.convert` does.
///
/// An archive holds `format`, `group_count` and, for every group, a nested archive `group/<i>` with
/// `options`, `param_count` and, for every parameter that has a state, `state/<i>`: `step`, the
/// states of the class, and `master_param` where there is one.
struct OptimizerClass {
  std::string name;                 ///< such as "FusedAdam"
  std::string algorithm;            ///< as FusedStep takes it
  std::string archive_format;       ///< an archive's value of `format`
  std::vector<std::string> states;  ///< names of all states that a parameter may have
  /// Makes an optimizer with the default options over these groups.
  std::function<std::unique_ptr<FusedOptimizer>(
      const std::vector<torch::optim::OptimizerParamGroup>&)>
      make;
  /// Writes the defaults of all options of a group.
  std::function<void(torch::serialize::OutputArchive&)> write_default_options;
  /// The states that every parameter of a group with these options has. Throws, naming the second
  /// argument and the option, for options that are missing, of another type or out of range.
  std::function<std::vector<std::string>(torch::serialize::InputArchive&, const std::string&)>
      required_states;
};

/// All classes of torchfuse, sorted by name.
TORCHFUSE_API std::vector<OptimizerClass> optimizer_classes();

}  // namespace torchfuse::optim
