// SPDX-License-Identifier: BSD-3-Clause
// Argument checks with one message form: "<op>: expected <arg>[<index>] to <property>, got <value>.
// <remedy>". Each returns normally or throws c10::Error.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "kernels/common/dtype.h"

namespace torchfuse::ops {

/// What a check speaks of: an op and one of its arguments, or one entry of a list argument; or, of
/// an optimizer, a parameter by its place, and what belongs to it.
struct Argument {
  const char* op;
  const char* name;
  std::int64_t index = -1;  ///< negative: not a list
  /// Not negative: `name` is what params[index] of this group has; empty for the parameter itself.
  std::int64_t group = -1;
};

/// The argument as messages name it.
std::string name_of(const Argument& argument);

/// The remedy for a layer's tensor that is not on the device of its input.
inline constexpr const char* kMoveTheModule = "Move the module to the device of its input.";

[[noreturn]] void fail(const Argument& argument, const std::string& expected,
                       const std::string& got, const char* remedy = "");

/// fp32, fp16, bf16 or fp64 as a kernel type; anything else fails.
kernels::DType dtype_of(const Argument& argument, const at::Tensor& tensor);

/// Whether the storage of a strided tensor holds all its elements. A storage can be resized under
/// the tensors that view it.
bool within_storage(const c10::TensorImpl& tensor);

/// Defined, strided, real floating point, on the CPU or a CUDA device, with memory behind every
/// element.
void check_tensor(const Argument& argument, const at::Tensor& tensor);

/// check_tensor, and elements that fill their memory without gaps or overlap, in any order, and are
/// the numbers that stand there.
void check_dense(const Argument& argument, const at::Tensor& tensor);

/// Whether the two store equal elements at equal offsets: same sizes and strides, dimensions of
/// size one aside.
bool same_layout(const at::Tensor& a, const at::Tensor& b);

/// Whether elements share memory: an expanded tensor, overlapping windows.
bool overlaps_itself(const at::Tensor& tensor);

void check_same_sizes(const Argument& argument, const at::Tensor& tensor,
                      const at::Tensor& reference, const char* reference_name);
void check_same_device(const Argument& argument, const at::Tensor& tensor,
                       const c10::Device& device, const char* reference_name,
                       const char* remedy =
                           "Move the model before building the optimizer, or load "
                           "the optimizer's state again.");
void check_same_length(const char* op, const char* name, std::size_t length, std::size_t expected,
                       const char* reference_name);

/// One element of type `dtype`, strided and with memory.
void check_scalar(const Argument& argument, const at::Tensor& tensor, at::ScalarType dtype);

/// An op writes to `tensor`: as torch's in-place ops, refuses a leaf that requires grad while
/// gradients are recorded.
void check_writable(const Argument& argument, const at::Tensor& tensor);

/// Tells autograd that an op wrote to `tensor`, if there is one. Inference tensors have no version.
inline void mark_written(c10::TensorImpl* tensor) {
  if (tensor != nullptr && !tensor->is_inference()) tensor->bump_version();
}
inline void mark_written(const at::Tensor& tensor) {
  if (tensor.defined()) mark_written(tensor.unsafeGetTensorImpl());
}

/// Throws for CUDA devices in a build without CUDA, with the way to one that has it.
void check_backend(const char* op, const c10::Device& device);

}  // namespace torchfuse::ops
