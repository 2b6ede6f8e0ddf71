// SPDX-License-Identifier: BSD-3-Clause
// The safetensors format: eight bytes with the header's length, the header as JSON, and the
// tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace torchfuse::checkpoint {

/// Contents of a safetensors file.
struct NamedWeights {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  std::map<std::string, std::string> metadata;
};

/// Writes a file atomically. Tensors with larger elements come first, so that all tensors are
/// aligned, and are otherwise sorted by name.
/// @param caller start of error messages.
void write_safetensors(const std::string& path, const NamedWeights& weights,
                       const std::string& caller);

/// Reads a file into tensors on the CPU, in file order.
/// @param caller start of error messages.
NamedWeights read_safetensors(const std::string& path, const std::string& caller);

}  // namespace torchfuse::checkpoint
