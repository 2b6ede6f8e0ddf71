// SPDX-License-Identifier: BSD-3-Clause
// The names that a pickle may use, and the values that the reader builds for them.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>

#include "api/checkpoint/pickle_input.h"
#include "api/checkpoint/pickle_reader.h"

namespace torchfuse::checkpoint {

/// Returns whether a name is a dtype, such as "torch.float32".
bool is_dtype(const std::string& name);

/// Throws unless call() or storage_of() supports the name.
void check_global(const PickleInput& input, const std::string& name);

/// Returns the value that the pickle's call would return, without calling anything.
c10::IValue call(const PickleInput& input, const std::string& name, const c10::IValue& arguments);

/// Returns the storage with this id, as a 1-dim tensor.
at::Tensor storage_of(const PickleInput& input, const c10::IValue& id,
                      const ReadStorage& read_storage);

}  // namespace torchfuse::checkpoint
