// SPDX-License-Identifier: BSD-3-Clause
// Text that other programs read.
#pragma once

#include <string_view>

namespace torchfuse::checkpoint {

/// Whether bytes are UTF-8.
/// @param surrogates whether halves of characters are taken too: Python's strings may hold them.
bool is_utf8(std::string_view text, bool surrogates = false);

}  // namespace torchfuse::checkpoint
