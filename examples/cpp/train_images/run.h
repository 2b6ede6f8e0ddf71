// SPDX-License-Identifier: BSD-3-Clause
// What a run measured: the content of its result file, which examples/python/image_report.py reads.
#pragma once

#include <string>
#include <vector>

namespace images {

/// The processor's name as the system tells it.
std::string cpu_name();

struct Run {
  std::string device;     ///< the processor's name, or "GPU"
  std::string precision;  ///< "fp32", "bf16" or "fp16"
  std::vector<double> losses = {};
  std::vector<double> accuracies = {};
  std::vector<double> step_seconds = {};

  /// Writes it as JSON, with the memory that this process has used at most and what the system has.
  void write(const std::string& path) const;
};

}  // namespace images
