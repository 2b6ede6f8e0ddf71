// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include <torchfuse/export.h>

namespace torchfuse {

/// Replaces `tensor` by its reduction over the processes of each group in turn, with torch's
/// functional collectives, which know process groups by their name. Does not wait for a CUDA
/// device; works on any torch that was built with torch.distributed.
///
///     at::Tensor found_inf = ...;
///     torchfuse::all_reduce_(found_inf, "max", {group->getGroupName()});
///
/// @param tensor contiguous, of a type that the groups' backends can reduce.
/// @param reduction "sum", "max", "min" or "avg".
/// @param groups names of process groups (c10d's); none leaves the tensor as it is.
/// @throws c10::Error if torch has no such collective or does not know a group.
TORCHFUSE_API void all_reduce_(const at::Tensor& tensor, const std::string& reduction,
                               const std::vector<std::string>& groups);

}  // namespace torchfuse
