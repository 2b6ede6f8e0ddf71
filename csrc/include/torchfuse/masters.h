// SPDX-License-Identifier: BSD-3-Clause
// fp32 masters of 16-bit parameters, and the remainders that stand for them.
#pragma once

#include <ATen/core/Tensor.h>

#include <torchfuse/export.h>

namespace torchfuse {

/// The fp32 master of a bf16 parameter whose state is an int16 remainder: the number with the bits
/// (param << 16) + remainder, both taken as integers. Same sizes and strides as `param`.
/// @throws c10::Error for other dtypes or sizes.
TORCHFUSE_API at::Tensor master_of_remainder(const at::Tensor& param, const at::Tensor& remainder);

/// The remainder that belongs to a bf16 parameter which is `master` (fp32) rounded to nearest even,
/// as every parameter with an fp32 master is: exact, except where the master lies halfway between
/// two bf16 values and was rounded towards zero. Such a parameter's remainder would be 32768, which
/// int16 does not hold; it gets 32767, and the restored master is smaller by one unit in the
/// last place.
/// @throws c10::Error for other dtypes.
TORCHFUSE_API at::Tensor remainder_of_master(const at::Tensor& master);

/// Brings an fp32 master, in place, to a 16-bit parameter that was written to: elements that do not
/// round to the parameter's become the parameter's, all others keep their bits. Steps do it by
/// themselves when autograd knows of the write.
/// @throws c10::Error for other dtypes or sizes.
TORCHFUSE_API void remake_master(const at::Tensor& param, const at::Tensor& master);

}  // namespace torchfuse
