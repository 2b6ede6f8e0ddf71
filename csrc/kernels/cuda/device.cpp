// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/device.h"

#include <cuda_runtime_api.h>

#include <cstring>

namespace torchfuse::kernels {

Status multiprocessor_count(int device, int* count) {
  const cudaError_t error = cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
  return {static_cast<int>(error), "cudaDeviceGetAttribute"};
}

Status capture_id(Stream stream, std::uint64_t* id) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long found = 0;
  const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &found);
  *id = status == cudaStreamCaptureStatusNone ? 0 : found;
  return {static_cast<int>(error), "cudaStreamGetCaptureInfo"};
}

DeviceName current_device_name() {
  DeviceName found;
  cudaDeviceProp card{};
  if (cudaGetDevice(&found.index) != cudaSuccess ||
      cudaGetDeviceProperties(&card, found.index) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return {};
  }
  found.capability = card.major * 10 + card.minor;
  static_assert(sizeof(found.name) == sizeof(card.name));
  std::memcpy(found.name, card.name, sizeof(found.name));
  return found;
}

const char* error_name(int error) { return cudaGetErrorName(static_cast<cudaError_t>(error)); }
const char* error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

bool is_missing_code(int error) {
  return error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
         error == cudaErrorUnsupportedPtxVersion;
}

const char* compiled_capabilities() { return TORCHFUSE_CUDA_ARCHITECTURES; }
int compiled_with_cuda() { return CUDART_VERSION / 1000; }

}  // namespace torchfuse::kernels
