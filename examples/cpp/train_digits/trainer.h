// SPDX-License-Identifier: BSD-3-Clause
// Data, network and training loop of the handwritten-digits example.
#pragma once

#include <torch/torch.h>

#include <filesystem>
#include <optional>
#include <string>

namespace digits {

/// Images are [N, 1, 8, 8] fp32 in [0, 1], labels are [N] int64 in 0..9.
struct Digits {
  torch::Tensor train_images;
  torch::Tensor train_labels;
  torch::Tensor test_images;
  torch::Tensor test_labels;
};

/// Reads {train,test}_images.f32 and {train,test}_labels.i64, raw little-endian arrays.
Digits load_digits(const std::filesystem::path& folder);

/// What one training run measured.
struct Result {
  double step_ms = 0.0;  ///< median
  double peak_mib = 0.0;
  double accuracy = 0.0;  ///< on the test images, 0..1
  double final_scale = 1.0;
};

/// Trains the network in "fp32", "bf16" or "fp16" mixed precision and tests it; shows its progress.
/// Wants a process of its own on a CPU, where peak memory is that of the process.
Result train(const std::string& mode, const Digits& data, torch::Device device, int epochs);

}  // namespace digits
