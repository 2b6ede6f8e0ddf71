// SPDX-License-Identifier: BSD-3-Clause
// How the ranks of a group compare what they are about to do.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <string>
#include <vector>

#include "api/parallel/collectives.h"

namespace torchfuse::parallel {

/// Returns each rank's text, in the order of ranks. A collective.
/// @param device from which the group can send.
/// @param what names the exchange in error messages.
std::vector<std::string> gather_texts(const Collectives& collectives, const c10::Device& device,
                                      const std::string& mine, const std::string& what);

/// Throws the same error on all ranks if the summary of one differs from rank 0's. A collective:
/// all ranks send a checksum, and lines only if checksums differ.
///
/// @param device from which the group can send.
/// @param expected names what is compared: "the parameters".
/// @param summary differs wherever the lines differ.
/// @param lines describe what is compared, one entry each.
void check_agreement(const Collectives& collectives, const c10::Device& device,
                     const char* expected, const std::string& summary,
                     const std::function<std::vector<std::string>()>& lines);

}  // namespace torchfuse::parallel
