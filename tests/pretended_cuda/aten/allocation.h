// SPDX-License-Identifier: BSD-3-Clause
// Memory that ATen gives out starts as NaN, also where torch's allocator has used it before.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymIntArrayRef.h>

#include <optional>

namespace pretended_cuda {

/// aten::empty.memory_format and aten::empty_strided on CUDA. Inside of a capture the memory stays
/// as it is: a graph may keep values from one replay to the next.
at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<at::Device> device,
                 std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format);
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                         std::optional<at::Device> device, std::optional<bool> pin_memory);

/// A CUDA tensor that is like `tensor`, for results: it is about to be written, and not filled
/// first.
at::Tensor empty_for_result(const at::Tensor& tensor, c10::Device device);

}  // namespace pretended_cuda
