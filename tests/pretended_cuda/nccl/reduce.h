// SPDX-License-Identifier: BSD-3-Clause
// Sums and the like over the ranks.
#pragma once

#include <nccl.h>

#include <cstddef>

namespace pretended_nccl {

/// `out`, of `count` elements, from `landed`, which has them of rank 0, rank 1 and so on. Ranks are
/// taken in that order, and each partial result is rounded to the type. An average multiplies each
/// value of a floating type by 1/ranks first, and divides the sum of integers, as NCCL's do.
void reduce(ncclDataType_t type, ncclRedOp_t operation, const void* landed, void* out,
            std::size_t count, int ranks);

/// Whether reduce() has the type and the operation.
bool can_reduce(ncclDataType_t type, ncclRedOp_t operation);

}  // namespace pretended_nccl
