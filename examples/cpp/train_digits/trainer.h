// SPDX-License-Identifier: BSD-3-Clause
// Network and training loop of the handwritten-digits example.
#pragma once

#include <torch/torch.h>

#include <string>

#include "data.h"

namespace digits {

/// What one training run measured.
struct Result {
  double step_ms = 0.0;  ///< median
  double peak_mib = 0.0;
  double accuracy = 0.0;  ///< on the test images, 0..1
  double final_scale = 1.0;
};

/// Trains the network in "fp32", "bf16" or "fp16" mixed precision and tests it; shows its progress.
/// On a CPU it needs a process of its own, because peak memory is that of the process.
Result train(const std::string& mode, const Digits& data, torch::Device device, int epochs);

}  // namespace digits
