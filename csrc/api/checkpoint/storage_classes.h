// SPDX-License-Identifier: BSD-3-Clause
// The names that pickles give to dtypes.
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <string_view>

namespace torchfuse::checkpoint {

struct StorageClass {
  at::ScalarType dtype;
  std::string_view storage;  ///< the class of typed storages in Python's torch
  std::string_view name;     ///< of the dtype in Python's torch
};

inline constexpr std::array<StorageClass, 12> kStorageClasses{{
    {at::kDouble, "DoubleStorage", "float64"},
    {at::kFloat, "FloatStorage", "float32"},
    {at::kHalf, "HalfStorage", "float16"},
    {at::kBFloat16, "BFloat16Storage", "bfloat16"},
    {at::kLong, "LongStorage", "int64"},
    {at::kInt, "IntStorage", "int32"},
    {at::kShort, "ShortStorage", "int16"},
    {at::kChar, "CharStorage", "int8"},
    {at::kByte, "ByteStorage", "uint8"},
    {at::kBool, "BoolStorage", "bool"},
    {at::kComplexFloat, "ComplexFloatStorage", "complex64"},
    {at::kComplexDouble, "ComplexDoubleStorage", "complex128"},
}};

}  // namespace torchfuse::checkpoint
