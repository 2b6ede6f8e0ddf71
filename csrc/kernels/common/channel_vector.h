// SPDX-License-Identifier: BSD-3-Clause
// Vectors of weights, biases and statistics, whose type is known at run time.
#pragma once

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/float16.h"
#include "kernels/common/macros.h"

namespace torchfuse::kernels {

/// Calls body(T()) with a storage type's compute type, on the host.
template <class Body>
void with_compute_type(DType dtype, const Body& body) {
  if (dtype == DType::kFloat64) return body(double());
  body(float());
}

/// A number per channel, or per column of a row.
struct ChannelInput {
  const void* data = nullptr;  ///< null if absent
  DType dtype = DType::kFloat32;
};
struct ChannelOutput {
  void* data = nullptr;  ///< null if not wanted
  DType dtype = DType::kFloat32;
};

TORCHFUSE_HOST_DEVICE double load_channel(const void* data, DType dtype, std::int64_t c,
                                          double otherwise) {
  if (data == nullptr) return otherwise;
  if (dtype == DType::kFloat64) return static_cast<const double*>(data)[c];
  if (dtype == DType::kFloat32) return static_cast<double>(static_cast<const float*>(data)[c]);
  if (dtype == DType::kFloat16)
    return static_cast<double>(to_float(static_cast<const Half*>(data)[c]));
  return static_cast<double>(to_float(static_cast<const BFloat16*>(data)[c]));
}
TORCHFUSE_HOST_DEVICE double load_channel(const ChannelInput& vector, std::int64_t c,
                                          double otherwise) {
  return load_channel(vector.data, vector.dtype, c, otherwise);
}

TORCHFUSE_HOST_DEVICE void store_channel(const ChannelOutput& vector, std::int64_t c,
                                         double value) {
  if (vector.data == nullptr) return;
  const float narrow = static_cast<float>(value);
  if (vector.dtype == DType::kFloat64) static_cast<double*>(vector.data)[c] = value;
  if (vector.dtype == DType::kFloat32) static_cast<float*>(vector.data)[c] = narrow;
  if (vector.dtype == DType::kFloat16) static_cast<Half*>(vector.data)[c] = to_half(narrow);
  if (vector.dtype == DType::kBFloat16) {
    static_cast<BFloat16*>(vector.data)[c] = to_bfloat16(narrow);
  }
}

}  // namespace torchfuse::kernels
