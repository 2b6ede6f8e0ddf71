// SPDX-License-Identifier: BSD-3-Clause
#include "allocation.h"

#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstring>

#include "../runtime/pretended_cuda.h"

namespace pretended_cuda {
namespace {

/// Behind what the stream still does with the memory; at once if that is nothing, because another
/// stream may use memory that was just given out.
void poison(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(tensor.device());
  const auto stream = c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream();
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  if (status != cudaStreamCaptureStatusNone) return;
  void* const begin = tensor.storage().mutable_data();
  const std::size_t bytes = tensor.storage().nbytes();
  if (pretended_cuda_is_idle(stream) != 0) {
    pretended_cuda_open_memory();
    std::memset(begin, 0xff, bytes);
    pretended_cuda_close_memory();
  } else {
    C10_CUDA_CHECK(cudaMemsetAsync(begin, 0xff, bytes, stream));
  }
}

}  // namespace

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<at::Device> device,
                 std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  at::Tensor tensor = at::detail::empty_cuda(C10_AS_INTARRAYREF_SLOW(size), dtype, layout, device,
                                             pin_memory, format);
  poison(tensor);
  return tensor;
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                         std::optional<at::Device> device, std::optional<bool> pin_memory) {
  at::Tensor tensor =
      at::detail::empty_strided_cuda(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                     dtype, layout, device, pin_memory);
  poison(tensor);
  return tensor;
}

at::Tensor empty_for_result(const at::Tensor& tensor, c10::Device device) {
  if (tensor.is_non_overlapping_and_dense()) {
    return at::detail::empty_strided_cuda(tensor.sizes(), tensor.strides(), tensor.scalar_type(),
                                          device);
  }
  return at::detail::empty_cuda(tensor.sizes(), tensor.scalar_type(), device, std::nullopt);
}

}  // namespace pretended_cuda
