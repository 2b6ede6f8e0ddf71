// SPDX-License-Identifier: BSD-3-Clause
// libcuda.so.1: the functions of the driver that torch's libraries import. What a context is called
// with is a device of the pretended runtime; what needs machine code ends the program by name.
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <utility>

#define DRIVER_API extern "C" __attribute__((visibility("default")))

namespace {

void* context_of(int device) { return reinterpret_cast<void*>(std::intptr_t{device} + 1); }

[[noreturn]] void lacks(const char* function) {
  std::fprintf(stderr, "pretended CUDA lacks the driver's function %s.\n", function);
  std::abort();
}

int refuse_another_runtime() {
  static bool said = false;
  if (!std::exchange(said, true)) {
    std::fprintf(
        stderr,
        "pretended CUDA: expected libraries that use the shared CUDA runtime, got one with "
        "a runtime of its own. Build torchfuse with TORCHFUSE_PRETENDED_CUDA=ON.\n");
  }
  return 3;  // CUDA_ERROR_NOT_INITIALIZED
}

}  // namespace

DRIVER_API int cuCtxGetCurrent(void** context) {
  int device = 0;
  cudaGetDevice(&device);
  *context = context_of(device);
  return 0;
}

DRIVER_API int cuCtxSetCurrent(void* context) {
  if (context == nullptr) return 0;
  return cudaSetDevice(static_cast<int>(reinterpret_cast<std::intptr_t>(context)) - 1);
}

DRIVER_API int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}

DRIVER_API int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}

DRIVER_API int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = context_of(device);
  return 0;
}

DRIVER_API int cuGetErrorString(int, const char** words) {
  *words = "an error of the pretended driver";
  return 0;
}

// A runtime that is linked into a library looks for the driver by itself. Which of these it asks
// first differs from version to version.
DRIVER_API int cuInit(unsigned) { return refuse_another_runtime(); }
DRIVER_API int cuDriverGetVersion(int*) { return refuse_another_runtime(); }
DRIVER_API int cuGetProcAddress_v2(const char*, void**, int, std::uint64_t, void*) {
  return refuse_another_runtime();
}

#define PRETENDED_CUDA_LACKS(function) \
  DRIVER_API int function() { lacks(#function); }
PRETENDED_CUDA_LACKS(cuDeviceGetAttribute)
PRETENDED_CUDA_LACKS(cuFuncGetAttribute)
PRETENDED_CUDA_LACKS(cuFuncSetAttribute)
PRETENDED_CUDA_LACKS(cuFuncSetCacheConfig)
PRETENDED_CUDA_LACKS(cuLaunchCooperativeKernel)
PRETENDED_CUDA_LACKS(cuLaunchKernel)
PRETENDED_CUDA_LACKS(cuLinkAddData_v2)
PRETENDED_CUDA_LACKS(cuLinkComplete)
PRETENDED_CUDA_LACKS(cuLinkCreate_v2)
PRETENDED_CUDA_LACKS(cuModuleGetFunction)
PRETENDED_CUDA_LACKS(cuModuleLoad)
PRETENDED_CUDA_LACKS(cuModuleLoadData)
PRETENDED_CUDA_LACKS(cuModuleLoadDataEx)
PRETENDED_CUDA_LACKS(cuModuleUnload)
PRETENDED_CUDA_LACKS(cuOccupancyMaxActiveBlocksPerMultiprocessor)
PRETENDED_CUDA_LACKS(cuPointerGetAttribute)
PRETENDED_CUDA_LACKS(cuTensorMapEncodeTiled)
