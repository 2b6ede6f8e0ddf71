// SPDX-License-Identifier: BSD-3-Clause
// Argument checks with one message form: "<op>: expected <arg>[<index>] to <property>, got <value>.
// <remedy>". Every check returns normally or throws c10::Error.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "kernels/common/dtype.h"

namespace torchfuse::ops {

/// Names the subject of a check: an op's argument, one entry of an op's list argument, or a tensor
/// that belongs to an optimizer's parameter.
struct Argument {
  const char* op;
  const char* name;
  std::int64_t index = -1;  ///< negative if the argument is not a list
  /// If not negative, `name` is a tensor that belongs to params[index] of this group. An empty
  /// `name` means the parameter.
  std::int64_t group = -1;
};

/// Returns the argument's name for messages.
std::string name_of(const Argument& argument);

/// Remedy if a layer's tensor is not on the device of the layer's input.
inline constexpr const char* kMoveTheModule = "Move the module to the device of its input.";

[[noreturn]] void fail(const Argument& argument, const std::string& expected,
                       const std::string& got, const char* remedy = "");

/// Returns the kernel type of an fp32, fp16, bf16 or fp64 tensor. Throws for any other dtype.
kernels::DType dtype_of(const Argument& argument, const at::Tensor& tensor);

/// Returns whether a strided tensor's storage contains all elements. A storage can be resized while
/// tensors view it.
bool within_storage(const c10::TensorImpl& tensor);

/// Checks that the tensor is defined, strided, real floating-point and on the CPU or a CUDA device,
/// and that every element has memory.
void check_tensor(const Argument& argument, const at::Tensor& tensor);

/// Calls check_tensor(), and checks that the elements fill their memory without gaps or overlap, in
/// any order. A view with the negative bit is an error.
void check_dense(const Argument& argument, const at::Tensor& tensor);

/// Returns whether both tensors store equal elements at equal offsets, that is, have the same sizes
/// and strides. Dimensions of size one are ignored.
bool same_layout(const at::Tensor& a, const at::Tensor& b);

/// Returns whether elements share memory, as in an expanded tensor or in overlapping windows.
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

/// Checks that the tensor is strided, has memory, and holds one element of type `dtype`.
void check_scalar(const Argument& argument, const at::Tensor& tensor, at::ScalarType dtype);

/// Checks that an op may write to `tensor`. Like torch's in-place ops, throws for a leaf that
/// requires grad while gradients are recorded.
void check_writable(const Argument& argument, const at::Tensor& tensor);

/// Tells autograd that an op wrote to `tensor`, if `tensor` is defined. Inference tensors have no
/// version counter.
inline void mark_written(c10::TensorImpl* tensor) {
  if (tensor != nullptr && !tensor->is_inference()) tensor->bump_version();
}
inline void mark_written(const at::Tensor& tensor) {
  if (tensor.defined()) mark_written(tensor.unsafeGetTensorImpl());
}

/// Throws for a CUDA device in a build without CUDA, and says how to build with CUDA.
void check_backend(const char* op, const c10::Device& device);

}  // namespace torchfuse::ops
