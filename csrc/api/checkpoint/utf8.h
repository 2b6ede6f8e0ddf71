// SPDX-License-Identifier: BSD-3-Clause
// Checks text that other programs read.
#pragma once

#include <string_view>

namespace torchfuse::checkpoint {

/// Returns whether bytes are UTF-8.
/// @param surrogates accept surrogates, which Python strings may contain (default false).
bool is_utf8(std::string_view text, bool surrogates = false);

}  // namespace torchfuse::checkpoint
