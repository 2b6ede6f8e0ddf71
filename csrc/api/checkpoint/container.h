// SPDX-License-Identifier: BSD-3-Clause
// One plain value, with all its tensors, in a file in torch's format.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string>

namespace torchfuse::checkpoint {

/// Writes a file that torch.load(path, weights_only=True) reads. Atomic: see AtomicFile.
void write_container(const std::string& path, const c10::IValue& value, const std::string& caller);

struct Container {
  c10::IValue value;
  std::uint64_t sum;  ///< checksum of the bytes; differs between different files
};

/// Reads a file written by write_container() or Python's torch.save, with all tensors on the CPU.
/// @throws c10::ValueError naming the file if it is missing, truncated, damaged or in another
///   format, and c10::Error if it cannot be read.
Container read_container(const std::string& path, const std::string& caller);

}  // namespace torchfuse::checkpoint
