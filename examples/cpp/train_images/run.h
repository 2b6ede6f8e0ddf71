// SPDX-License-Identifier: BSD-3-Clause
// What a run measured: the content of its result file, which examples/python/image_report.py reads.
#pragma once

#include <torch/torch.h>

#include <string>
#include <vector>

namespace images {

/// The processor's name as the system tells it.
std::string cpu_name();

/// In MiB: of a GPU what all programs together use of it; of the CPU the peak of this process, and
/// what the system says is available.
struct Memory {
  double used = 0;
  double free = 0;
  double total = 0;
};

Memory memory_now(const torch::Device& device);

struct Run {
  std::string device;     ///< the processor's name, or "GPU"
  std::string precision;  ///< "fp32", "bf16" or "fp16"
  std::vector<double> losses = {};
  std::vector<double> accuracies = {};
  std::vector<double> step_seconds = {};
  Memory memory = {};

  /// Writes it as JSON.
  void write(const std::string& path) const;
};

}  // namespace images
