// SPDX-License-Identifier: BSD-3-Clause
// What save_checkpoint() writes, and checks of what was read.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "api/checkpoint/values.h"

namespace torchfuse::checkpoint {

inline constexpr std::int64_t kFormat = 1;

/// The dictionary `value`, after checking that save_checkpoint() wrote it.
/// @param where "load_checkpoint: expected <file>", for error messages.
Dict checked_contents(const c10::IValue& value, const std::string& where);

/// The class that checked_contents() name for a part, if any.
std::optional<std::string> class_of(const Dict& contents, const std::string& part);

}  // namespace torchfuse::checkpoint
