// SPDX-License-Identifier: BSD-3-Clause
// The names that pickles give to dtypes.
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <string_view>

namespace torchfuse::checkpoint {

struct StorageClass {
  at::ScalarType dtype;
  /// The class of typed storages in Python's torch; newer dtypes have none. Files of Python alone
  /// hold these.
  std::string_view storage;
  std::string_view name;  ///< of the dtype in Python's torch
};

inline constexpr std::array<StorageClass, 20> kStorageClasses{{
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
    {at::kUInt16, "", "uint16"},
    {at::kUInt32, "", "uint32"},
    {at::kUInt64, "", "uint64"},
    {at::kComplexHalf, "", "complex32"},
    {at::kFloat8_e5m2, "", "float8_e5m2"},
    {at::kFloat8_e4m3fn, "", "float8_e4m3fn"},
    {at::kFloat8_e5m2fnuz, "", "float8_e5m2fnuz"},
    {at::kFloat8_e4m3fnuz, "", "float8_e4m3fnuz"},
}};

}  // namespace torchfuse::checkpoint
