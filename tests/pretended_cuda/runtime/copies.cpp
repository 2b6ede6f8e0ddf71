// SPDX-License-Identifier: BSD-3-Clause
// Allocation, copies, fills, and what is known of an address.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "capture.h"
#include "device.h"
#include "memory.h"
#include "scheduler.h"

using namespace pretended_cuda;

namespace {

cudaError_t refuse_unsafe_call() {
  return Captures::instance().refuse_unsafe_call(Scheduler::instance().lock());
}

bool is_on_device(const void* address) {
  const auto allocation = Memory::instance().find(address);
  return allocation && allocation->kind == MemoryKind::kDevice;
}

/// Whether the kind of copy names where the two addresses are.
bool matches(cudaMemcpyKind kind, bool to_device, bool from_device) {
  switch (kind) {
    case cudaMemcpyHostToHost:
      return !to_device && !from_device;
    case cudaMemcpyHostToDevice:
      return to_device && !from_device;
    case cudaMemcpyDeviceToHost:
      return !to_device && from_device;
    case cudaMemcpyDeviceToDevice:
      return to_device && from_device;
    default:
      return true;
  }
}

/// A pageable source is read before the call returns, and a pageable destination is written by
/// then, as on a device. Pinned memory is read and written when the stream comes to it.
cudaError_t copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                 cudaStream_t given, bool wait) {
  if (const cudaError_t error = fault()) return error;
  if (bytes == 0) return cudaSuccess;
  Memory& memory = Memory::instance();
  const bool in_bounds = memory.in_bounds(from, bytes) && memory.in_bounds(to, bytes);
  if (!in_bounds || !matches(kind, is_on_device(to), is_on_device(from))) {
    return report(cudaErrorInvalidValue);
  }
  Scheduler& scheduler = Scheduler::instance();
  Lock lock = scheduler.lock();
  CUstream_st* const stream = scheduler.resolve(given);
  const bool recorded = stream->capture != nullptr;
  if (wait && recorded) {
    stream->capture->invalid = true;
    return report(cudaErrorStreamCaptureUnsupported);
  }
  if (!memory.find(from) && !recorded) {
    const std::shared_ptr<char[]> staged(new char[bytes]);
    std::memcpy(staged.get(), from, bytes);
    scheduler.submit(lock, stream, {.name = "copy of staged memory", .run = [=] {
                                      std::memcpy(to, staged.get(), bytes);
                                      return true;
                                    }});
  } else {
    scheduler.submit(lock, stream, {.name = "copy", .run = [=] {
                                      std::memmove(to, from, bytes);
                                      return true;
                                    }});
  }
  if (!recorded && (wait || !memory.find(to))) scheduler.wait(lock, stream->end());
  return fault();
}

cudaError_t fill(void* begin, int value, std::size_t bytes, cudaStream_t given) {
  if (const cudaError_t error = fault()) return error;
  if (!is_on_device(begin) || !Memory::instance().in_bounds(begin, bytes)) {
    return bytes == 0 ? cudaSuccess : report(cudaErrorInvalidValue);
  }
  Scheduler& scheduler = Scheduler::instance();
  Lock lock = scheduler.lock();
  scheduler.submit(lock, scheduler.resolve(given), {.name = "fill", .run = [=] {
                                                      std::memset(begin, value, bytes);
                                                      return true;
                                                    }});
  return cudaSuccess;
}

cudaError_t lacks(const char* function) {
  std::fprintf(stderr, "pretended CUDA lacks %s.\n", function);
  return report(cudaErrorNotSupported);
}

}  // namespace

// --- Allocation ----------------------------------------------------------------------------------

PRETENDED_CUDA_API cudaError_t cudaMalloc(void** begin, std::size_t bytes) {
  *begin = nullptr;
  if (const cudaError_t error = refuse_unsafe_call()) return error;
  if (bytes == 0) return cudaSuccess;
  *begin = Memory::instance().allocate_device(bytes, current_device());
  return *begin != nullptr ? cudaSuccess : report(cudaErrorMemoryAllocation);
}

namespace {

/// Where memory is, or was allocated for. Other devices' work goes on while it is freed.
int device_of(const void* begin) {
  const auto allocation = Memory::instance().find(begin);
  return allocation ? allocation->device : current_device();
}

}  // namespace

PRETENDED_CUDA_API cudaError_t cudaFree(void* begin) {
  if (begin == nullptr) return fault();
  if (const cudaError_t error = refuse_unsafe_call()) return error;
  {
    Lock lock = Scheduler::instance().lock();
    Scheduler::instance().wait_for_device(lock, device_of(begin));
  }
  const bool known = Memory::instance().release(begin, MemoryKind::kDevice);
  return known ? cudaSuccess : report(cudaErrorInvalidValue);
}

PRETENDED_CUDA_API cudaError_t cudaMallocAsync(void** begin, std::size_t bytes, cudaStream_t) {
  return cudaMalloc(begin, bytes);
}

PRETENDED_CUDA_API cudaError_t cudaFreeAsync(void* begin, cudaStream_t) { return cudaFree(begin); }

PRETENDED_CUDA_API cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *total = Memory::instance().limit();
  const std::size_t used = Memory::instance().used(current_device());
  *free = used < *total ? *total - used : 0;
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaHostAlloc(void** begin, std::size_t bytes, unsigned) {
  *begin = nullptr;
  if (const cudaError_t error = refuse_unsafe_call()) return error;
  if (bytes == 0) return cudaSuccess;
  *begin = Memory::instance().allocate_pinned(bytes, current_device());
  return *begin != nullptr ? cudaSuccess : report(cudaErrorMemoryAllocation);
}

PRETENDED_CUDA_API cudaError_t cudaFreeHost(void* begin) {
  if (begin == nullptr) return cudaSuccess;
  Lock lock = Scheduler::instance().lock();
  Scheduler::instance().wait_for_device(lock, device_of(begin));
  const bool known = Memory::instance().release(begin, MemoryKind::kPinned);
  return known ? cudaSuccess : report(cudaErrorInvalidValue);
}

PRETENDED_CUDA_API cudaError_t cudaHostRegister(void* begin, std::size_t bytes, unsigned) {
  if (begin == nullptr || bytes == 0) return report(cudaErrorInvalidValue);
  const bool is_new = Memory::instance().register_host(begin, bytes, current_device());
  return is_new ? cudaSuccess : report(cudaErrorHostMemoryAlreadyRegistered);
}

PRETENDED_CUDA_API cudaError_t cudaHostUnregister(void* begin) {
  Lock lock = Scheduler::instance().lock();
  Scheduler::instance().wait_for_device(lock, device_of(begin));
  const bool known = Memory::instance().release(begin, MemoryKind::kPinned);
  return known ? cudaSuccess : report(cudaErrorHostMemoryNotRegistered);
}

PRETENDED_CUDA_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                                        const void* address) {
  *attributes = {};
  const auto allocation = Memory::instance().find(address);
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = cudaInvalidDeviceId;
  if (!allocation) return cudaSuccess;
  const bool device = allocation->kind == MemoryKind::kDevice;
  attributes->type = device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  attributes->device = allocation->device;
  attributes->devicePointer = const_cast<void*>(address);
  attributes->hostPointer = device ? nullptr : const_cast<void*>(address);
  return cudaSuccess;
}

// Memory pools serve cudaMallocAsync, which is cudaMalloc here.
PRETENDED_CUDA_API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  static char pools[16];
  if (!is_device(device)) return cudaErrorInvalidDevice;
  *pool = reinterpret_cast<cudaMemPool_t>(&pools[device]);
  return cudaSuccess;
}
PRETENDED_CUDA_API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return lacks("cudaMemPoolGetAttribute");
}
PRETENDED_CUDA_API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return cudaSuccess;
}
PRETENDED_CUDA_API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*,
                                                    std::size_t) {
  return cudaSuccess;
}
PRETENDED_CUDA_API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, std::size_t) { return cudaSuccess; }

// Memory of one process in another.
PRETENDED_CUDA_API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) {
  return lacks("cudaIpcGetMemHandle");
}
PRETENDED_CUDA_API cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) {
  return lacks("cudaIpcOpenMemHandle");
}
PRETENDED_CUDA_API cudaError_t cudaIpcCloseMemHandle(void*) {
  return lacks("cudaIpcCloseMemHandle");
}
PRETENDED_CUDA_API cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) {
  return lacks("cudaIpcGetEventHandle");
}
PRETENDED_CUDA_API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t) {
  return lacks("cudaIpcOpenEventHandle");
}

// --- Copies and fills ----------------------------------------------------------------------------

PRETENDED_CUDA_API cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes,
                                          cudaMemcpyKind kind) {
  if (const cudaError_t error = refuse_unsafe_call()) return error;
  return copy(to, from, bytes, kind, nullptr, true);
}

PRETENDED_CUDA_API cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes,
                                               cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(to, from, bytes, kind, stream, false);
}

PRETENDED_CUDA_API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int,
                                                   std::size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, cudaMemcpyDeviceToDevice, stream, false);
}

PRETENDED_CUDA_API cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from,
                                                 std::size_t from_pitch, std::size_t width,
                                                 std::size_t height, cudaMemcpyKind kind,
                                                 cudaStream_t stream) {
  for (std::size_t row = 0; row < height; ++row) {
    char* const row_to = static_cast<char*>(to) + row * to_pitch;
    const char* const row_from = static_cast<const char*>(from) + row * from_pitch;
    if (const cudaError_t error = copy(row_to, row_from, width, kind, stream, false)) return error;
  }
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaMemset(void* begin, int value, std::size_t bytes) {
  return fill(begin, value, bytes, nullptr);
}

PRETENDED_CUDA_API cudaError_t cudaMemsetAsync(void* begin, int value, std::size_t bytes,
                                               cudaStream_t stream) {
  return fill(begin, value, bytes, stream);
}
