// SPDX-License-Identifier: BSD-3-Clause
// The handwritten digits, as the Python examples export them.
#pragma once

#include <torch/torch.h>

#include <filesystem>

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

}  // namespace digits
