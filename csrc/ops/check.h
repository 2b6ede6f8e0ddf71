// SPDX-License-Identifier: BSD-3-Clause
// Argument checks with one message form: "<op>: expected <arg>[<index>] to <property>, got <value>.
// <remedy>". Each returns normally or throws c10::Error.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "kernels/common/dtype.h"

namespace torchfuse::ops {

/// What a check speaks of: an op and one of its arguments, or one entry of a list argument.
struct Argument {
  const char* op;
  const char* name;
  std::int64_t index = -1;  ///< negative: not a list
};

[[noreturn]] void fail(const Argument& argument, const std::string& expected,
                       const std::string& got, const char* remedy = "");

/// fp32, fp16, bf16 or fp64 as a kernel type; anything else fails.
kernels::DType dtype_of(const Argument& argument, const at::Tensor& tensor);

/// Defined, strided, real floating point, on the CPU or a CUDA device, with memory behind it.
void check_tensor(const Argument& argument, const at::Tensor& tensor);

/// check_tensor, and elements that fill their memory without gaps or overlap, in any order.
void check_dense(const Argument& argument, const at::Tensor& tensor);

/// Whether the two store equal elements at equal offsets: same sizes and strides, dimensions of
/// size one aside.
bool same_layout(const at::Tensor& a, const at::Tensor& b);

void check_same_sizes(const Argument& argument, const at::Tensor& tensor,
                      const at::Tensor& reference, const char* reference_name);
void check_same_device(const Argument& argument, const at::Tensor& tensor,
                       const c10::Device& device, const char* reference_name);
void check_same_length(const char* op, const char* name, std::size_t length, std::size_t expected,
                       const char* reference_name);

/// One element of type `dtype`, strided and with memory.
void check_scalar(const Argument& argument, const at::Tensor& tensor, at::ScalarType dtype);

/// An op writes to `tensor`: as torch's in-place ops, refuses a leaf that requires grad while
/// gradients are recorded.
void check_writable(const Argument& argument, const at::Tensor& tensor);

/// Tells autograd that an op wrote to `tensor`.
inline void mark_written(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

/// Throws for CUDA devices in a build without CUDA, with the way to one that has it.
void check_backend(const char* op, const c10::Device& device);

}  // namespace torchfuse::ops
