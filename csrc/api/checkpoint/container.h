// SPDX-License-Identifier: BSD-3-Clause
// One plain value in a file of torch's format, with all tensors.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string>

namespace torchfuse::checkpoint {

/// Writes a file that torch.load(path, weights_only=True) reads, in one step: see AtomicFile.
void write_container(const std::string& path, const c10::IValue& value, const std::string& caller);

struct Container {
  c10::IValue value;
  std::uint64_t sum;  ///< of the bytes; another one for another file
};

/// Reads what write_container() or Python's torch.save wrote, with all tensors on the CPU.
/// @throws c10::ValueError naming the file if it is not there, truncated, damaged or of another
/// kind, and c10::Error if it cannot be read.
Container read_container(const std::string& path, const std::string& caller);

}  // namespace torchfuse::checkpoint
