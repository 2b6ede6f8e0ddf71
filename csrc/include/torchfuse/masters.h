// SPDX-License-Identifier: BSD-3-Clause
// fp32 masters of 16-bit parameters, and the int16 remainders that encode them.
#pragma once

#include <ATen/core/Tensor.h>

#include <torchfuse/export.h>

namespace torchfuse {

/// Returns the fp32 master of a bf16 parameter whose state is an int16 remainder: the number with
/// the bits (param << 16) + remainder, both read as integers. If these bits are a NaN, as after a
/// write of 0 with a negative remainder, the master is the parameter's value. Same sizes and
/// strides as `param`.
/// @throws c10::Error for other dtypes or sizes.
TORCHFUSE_API at::Tensor master_of_remainder(const at::Tensor& param, const at::Tensor& remainder);

/// Returns the int16 remainder for a bf16 parameter equal to `master` (fp32) rounded to nearest
/// even, as every parameter with an fp32 master is. The remainder is exact, unless the master lies
/// halfway between two bf16 values and was rounded toward zero. The remainder is then 32767,
/// because int16 cannot store 32768, and the restored master is smaller by one unit in the last
/// place.
/// @throws c10::Error for other dtypes.
TORCHFUSE_API at::Tensor remainder_of_master(const at::Tensor& master);

/// Updates an fp32 master, in place, after a write to its 16-bit parameter. Elements that do not
/// round to the parameter's value are set to that value; all others keep the old bits. Steps call
/// this function after writes that autograd tracks. A `master` with dtype int16 is a remainder:
/// elements that master_of_remainder() ignores become 0.
/// @throws c10::Error for other dtypes or sizes.
TORCHFUSE_API void remake_master(const at::Tensor& param, const at::Tensor& master);

/// Copies a master's value, in place, to a parameter that was converted to fp32 or fp64, for
/// example by `model->to(torch::kFloat)`. Only elements equal to the rounded master are set.
/// Elements that were written since keep the new value. A `master` with dtype int16 is a remainder.
/// @throws c10::Error for other dtypes or sizes.
TORCHFUSE_API void take_master(const at::Tensor& param, const at::Tensor& master);

}  // namespace torchfuse
