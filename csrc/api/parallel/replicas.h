// SPDX-License-Identifier: BSD-3-Clause
// Whether all ranks have the same module.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "api/parallel/collectives.h"

namespace torchfuse::parallel {

/// "parameter 'fc.weight' Float [3, 4]"
std::string describe(const char* kind, const std::string& name, const at::Tensor& tensor);

/// Throws in all ranks if the lists differ anywhere.
/// @param lines one for each parameter and buffer of this rank.
/// @param device where the group's tensors are.
void check_same_on_all_ranks(const Collectives& collectives, const std::vector<std::string>& lines,
                             const c10::Device& device);

}  // namespace torchfuse::parallel
