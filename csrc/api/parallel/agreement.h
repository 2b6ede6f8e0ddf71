// SPDX-License-Identifier: BSD-3-Clause
// Whether all ranks do the same, before they change anything.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "api/parallel/collectives.h"

namespace torchfuse::parallel {

/// Throws the same sentence in all ranks if the summary of one differs from that of rank 0. All
/// ranks send a checksum; lines are made and sent only where checksums differ.
///
/// @param device from which the group can send.
/// @param expected the sentence up to "to be the same", without the caller's name.
/// @param summary differs wherever the lines do.
/// @param lines describe what is compared, one entry each.
void check_agreement(const Collectives& collectives, const c10::Device& device, const char* caller,
                     const char* expected, const std::string& summary,
                     const std::function<std::vector<std::string>()>& lines);

}  // namespace torchfuse::parallel
