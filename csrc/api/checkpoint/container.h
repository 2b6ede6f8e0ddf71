// SPDX-License-Identifier: BSD-3-Clause
// One plain value in a file of torch's format, with all tensors.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>

namespace torchfuse::checkpoint {

/// Writes a file that torch.load(path, weights_only=True) reads, in one step: see AtomicFile.
void write_container(const std::string& path, const c10::IValue& value, const std::string& caller);

/// Reads what write_container() or Python's torch.save wrote, with all tensors on the CPU.
/// @throws c10::ValueError naming the file if it is not there, truncated, damaged or of another
/// kind.
c10::IValue read_container(const std::string& path, const std::string& caller);

}  // namespace torchfuse::checkpoint
