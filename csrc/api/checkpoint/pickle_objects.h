// SPDX-License-Identifier: BSD-3-Clause
// What a pickle names, and the values that it builds with these names.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>

#include "api/checkpoint/pickle_input.h"
#include "api/checkpoint/pickle_reader.h"

namespace torchfuse::checkpoint {

/// Whether a name is that of a dtype, such as "torch.float32".
bool is_dtype(const std::string& name);

/// Throws unless a name is one that call() or storage_of() knows.
void check_global(const PickleInput& input, const std::string& name);

/// The value that a call of a known name returns; nothing is called.
c10::IValue call(const PickleInput& input, const std::string& name, const c10::IValue& arguments);

/// The storage with this id, as a 1-dim tensor.
at::Tensor storage_of(const PickleInput& input, const c10::IValue& id,
                      const ReadStorage& read_storage);

}  // namespace torchfuse::checkpoint
