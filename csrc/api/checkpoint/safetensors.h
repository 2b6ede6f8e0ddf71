// SPDX-License-Identifier: BSD-3-Clause
// The safetensors format: the length of a header in eight bytes, the header as JSON, and the
// tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace torchfuse::checkpoint {

/// What a safetensors file holds.
struct NamedWeights {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  std::map<std::string, std::string> metadata;
};

/// Writes a file in one step: tensors of larger elements first, so that all are aligned, and then
/// by name.
/// @param caller for error messages.
void write_safetensors(const std::string& path, const NamedWeights& weights,
                       const std::string& caller);

/// Reads a file into tensors on the CPU, in the order of their bytes.
/// @param caller for error messages.
NamedWeights read_safetensors(const std::string& path, const std::string& caller);

}  // namespace torchfuse::checkpoint
