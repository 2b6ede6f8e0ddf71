// SPDX-License-Identifier: BSD-3-Clause
// Checks that all ranks of a group are about to do the same.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <string>
#include <vector>

#include "api/parallel/collectives.h"

namespace torchfuse::parallel {

/// Returns each rank's text, in rank order. A collective.
/// @param device a device from which the group can send.
/// @param what names the collective in error messages.
std::vector<std::string> gather_texts(const Collectives& collectives, const c10::Device& device,
                                      const std::string& mine, const std::string& what);

/// Throws the same error on all ranks if any rank's summary differs from rank 0's. A collective:
/// all ranks send a checksum, and send lines only if checksums differ.
///
/// @param device a device from which the group can send.
/// @param expected subject of the error message: "the parameters".
/// @param summary must differ whenever the lines differ.
/// @param lines description for the error message, one entry per line.
void check_agreement(const Collectives& collectives, const c10::Device& device,
                     const char* expected, const std::string& summary,
                     const std::function<std::vector<std::string>()>& lines);

}  // namespace torchfuse::parallel
