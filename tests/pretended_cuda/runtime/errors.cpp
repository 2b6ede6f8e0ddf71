// SPDX-License-Identifier: BSD-3-Clause
// Errors: the last one of each thread, and a fault, which stays.
#include <atomic>
#include <cstdio>

#include "capture.h"
#include "device.h"
#include "pretended_cuda.h"
#include "scheduler.h"

namespace pretended_cuda {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
std::atomic<cudaError_t> device_fault = cudaSuccess;

}  // namespace

cudaError_t report(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

cudaError_t fault() { return report(device_fault); }

void set_fault(cudaError_t error, const char* what, const char* words) {
  std::fprintf(stderr, "pretended CUDA: %s: %s\n", what, words);
  device_fault = error;
}

void forget_fault() {
  device_fault = cudaSuccess;
  last_error = cudaSuccess;
}

namespace {

void forget_last_error() { last_error = cudaSuccess; }
cudaError_t peek_error() { return device_fault != cudaSuccess ? device_fault.load() : last_error; }

}  // namespace
}  // namespace pretended_cuda

using namespace pretended_cuda;

namespace {

struct ErrorWords {
  cudaError_t error;
  const char* name;
  const char* words;
};
#define PRETENDED_CUDA_ERROR(error, words) {error, #error, words}
constexpr ErrorWords kErrors[] = {
    PRETENDED_CUDA_ERROR(cudaSuccess, "no error"),
    PRETENDED_CUDA_ERROR(cudaErrorInvalidValue, "invalid argument"),
    PRETENDED_CUDA_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    PRETENDED_CUDA_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    PRETENDED_CUDA_ERROR(cudaErrorInvalidSymbol, "invalid device symbol"),
    PRETENDED_CUDA_ERROR(cudaErrorMissingConfiguration,
                         "__global__ function call is not configured"),
    PRETENDED_CUDA_ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    PRETENDED_CUDA_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    PRETENDED_CUDA_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    PRETENDED_CUDA_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    PRETENDED_CUDA_ERROR(cudaErrorIllegalState,
                         "the operation cannot be performed in the present state"),
    PRETENDED_CUDA_ERROR(cudaErrorSymbolNotFound, "named symbol not found"),
    PRETENDED_CUDA_ERROR(cudaErrorNotReady, "device not ready"),
    PRETENDED_CUDA_ERROR(cudaErrorHostMemoryAlreadyRegistered,
                         "part or all of the requested memory range is already mapped"),
    PRETENDED_CUDA_ERROR(cudaErrorHostMemoryNotRegistered,
                         "pointer does not correspond to a registered memory region"),
    PRETENDED_CUDA_ERROR(cudaErrorAssert, "device-side assert triggered"),
    PRETENDED_CUDA_ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    PRETENDED_CUDA_ERROR(cudaErrorNotSupported, "operation not supported"),
    PRETENDED_CUDA_ERROR(cudaErrorStreamCaptureUnsupported,
                         "operation not permitted when stream is capturing"),
    PRETENDED_CUDA_ERROR(cudaErrorStreamCaptureInvalidated,
                         "operation failed due to a previous error during capture"),
    PRETENDED_CUDA_ERROR(cudaErrorStreamCaptureMerge,
                         "operation would result in a merge of separate capture sequences"),
    PRETENDED_CUDA_ERROR(cudaErrorStreamCaptureUnmatched,
                         "capture was not ended in the same stream as it began"),
    PRETENDED_CUDA_ERROR(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    PRETENDED_CUDA_ERROR(cudaErrorStreamCaptureImplicit,
                         "operation would make the default stream depend on a capturing one"),
    PRETENDED_CUDA_ERROR(cudaErrorStreamCaptureIsolation,
                         "dependency created on uncaptured work in another stream"),
    PRETENDED_CUDA_ERROR(
        cudaErrorStreamCaptureWrongThread,
        "attempt to terminate a thread-local capture sequence from another thread"),
    PRETENDED_CUDA_ERROR(cudaErrorCapturedEvent,
                         "operation not permitted on an event last recorded "
                         "in a capturing stream"),
};
#undef PRETENDED_CUDA_ERROR

}  // namespace

PRETENDED_CUDA_API const char* cudaGetErrorName(cudaError_t error) {
  for (const ErrorWords& each : kErrors) {
    if (each.error == error) return each.name;
  }
  return "an error without a name in the pretended runtime";
}

PRETENDED_CUDA_API const char* cudaGetErrorString(cudaError_t error) {
  for (const ErrorWords& each : kErrors) {
    if (each.error == error) return each.words;
  }
  return "an error without words in the pretended runtime";
}

PRETENDED_CUDA_API cudaError_t cudaPeekAtLastError() { return peek_error(); }

PRETENDED_CUDA_API cudaError_t cudaGetLastError() {
  const cudaError_t error = peek_error();
  forget_last_error();
  return error;
}

PRETENDED_CUDA_API void pretended_cuda_fault(cudaError_t error, const char* words) {
  set_fault(error, "a kernel has failed", words);
}

PRETENDED_CUDA_API void pretended_cuda_reset() {
  Lock lock = Scheduler::instance().lock();
  Captures::instance().drop_all();
  Scheduler::instance().drop_pending(lock);
  forget_fault();
}
