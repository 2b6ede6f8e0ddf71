// SPDX-License-Identifier: BSD-3-Clause
// Names of dtypes in pickles.
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <string_view>

namespace torchfuse::checkpoint {

struct StorageClass {
  at::ScalarType dtype;
  /// Name of the typed storage class in Python's torch. Empty for newer dtypes, which only Python
  /// writes.
  std::string_view storage;
  std::string_view name;  ///< name of the dtype in Python's torch
};

inline constexpr std::array<StorageClass, 26> kStorageClasses{{
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
    {at::kFloat8_e8m0fnu, "", "float8_e8m0fnu"},
    {at::kBits8, "", "bits8"},
    {at::kBits16, "", "bits16"},
    {at::kBits1x8, "", "bits1x8"},
    {at::kBits2x4, "", "bits2x4"},
    {at::kBits4x2, "", "bits4x2"},
}};

/// Dtypes that are values in checkpoints, but never the dtype of a tensor there.
inline constexpr std::array<std::string_view, 20> kNamesAlone{
    "qint8", "quint8", "qint32", "quint4x2", "quint2x4",
    "int1",  "int2",   "int3",   "int4",     "int5",
    "int6",  "int7",   "uint1",  "uint2",    "uint3",
    "uint4", "uint5",  "uint6",  "uint7",    "float4_e2m1fn_x2"};

}  // namespace torchfuse::checkpoint
