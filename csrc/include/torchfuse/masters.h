// SPDX-License-Identifier: BSD-3-Clause
// fp32 masters of 16-bit parameters, and the int16 remainders that encode them.
#pragma once

#include <ATen/core/Tensor.h>

#include <torchfuse/export.h>

namespace torchfuse {

/// Returns the fp32 master of a bf16 parameter whose state is an int16 remainder: the number with
/// the bits (param << 16) + remainder, both taken as integers. Where these are a NaN, as after a
/// write of 0 beside a negative remainder, the master is the parameter. Same sizes and strides as
/// `param`.
/// @throws c10::Error for other dtypes or sizes.
TORCHFUSE_API at::Tensor master_of_remainder(const at::Tensor& param, const at::Tensor& remainder);

/// Returns the int16 remainder for a bf16 parameter that is `master` (fp32) rounded to nearest
/// even, as every parameter with an fp32 master is. It is exact, unless the master lies halfway
/// between two bf16 values and was rounded toward zero: the remainder is then 32767, because int16
/// cannot hold 32768, and the restored master is smaller by one unit in the last place.
/// @throws c10::Error for other dtypes.
TORCHFUSE_API at::Tensor remainder_of_master(const at::Tensor& master);

/// Updates an fp32 master, in place, after a write to its 16-bit parameter: elements that do not
/// round to the parameter's value get that value, all others keep their bits. Steps do this
/// themselves after writes that autograd tracks. A `master` of dtype int16 is a remainder: where
/// master_of_remainder() ignores it, it becomes 0.
/// @throws c10::Error for other dtypes or sizes.
TORCHFUSE_API void remake_master(const at::Tensor& param, const at::Tensor& master);

/// Gives a parameter that became fp32 or fp64, as by `model->to(torch::kFloat)`, its master's value
/// in place, where the parameter still has what the master rounds to. Elements that were written
/// since keep what was written.
/// A `master` of dtype int16 is a remainder.
/// @throws c10::Error for other dtypes or sizes.
TORCHFUSE_API void take_master(const at::Tensor& param, const at::Tensor& master);

}  // namespace torchfuse
