// SPDX-License-Identifier: BSD-3-Clause
// Devices and their properties.
#include "device.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "memory.h"

namespace pretended_cuda {
namespace {

/// The figures of an H100, which a program may size its grids by.
constexpr int kMultiprocessors = 132;
constexpr int kCapability = 90;
constexpr int kMaxThreadsPerBlock = 1024;
constexpr int kMaxThreadsPerMultiprocessor = 2048;
constexpr int kWarp = 32;
constexpr int kSharedPerBlock = 48 * 1024;
constexpr int kSharedPerBlockOptin = 227 * 1024;
constexpr int kRegisters = 65536;
constexpr int kRuntimeVersion = CUDART_VERSION;
constexpr int kMostDevices = 16;

thread_local int chosen_device = 0;

int capability() {
  static const auto capability =
      static_cast<int>(setting("PRETENDED_CUDA_CAPABILITY", kCapability));
  return capability;
}

}  // namespace

unsigned long long setting(const char* name, unsigned long long otherwise) {
  const char* const words = std::getenv(name);
  if (words == nullptr || *words == '\0') return otherwise;
  char* end = nullptr;
  const unsigned long long value = std::strtoull(words, &end, 10);
  if (*end == '\0') return value;
  std::fprintf(stderr, "pretended CUDA: expected %s to be a whole number, got '%s'.\n", name,
               words);
  std::abort();
}

int device_count() {
  static const auto count = static_cast<int>(
      std::min<unsigned long long>(setting("PRETENDED_CUDA_DEVICES", 1), kMostDevices));
  return count;
}

int current_device() { return chosen_device; }

bool is_device(int device) {
  if (device >= 0 && device < device_count()) return true;
  report(cudaErrorInvalidDevice);
  return false;
}

}  // namespace pretended_cuda

using namespace pretended_cuda;

PRETENDED_CUDA_API cudaError_t cudaGetDeviceCount(int* count) {
  load_redirect();
  *count = device_count();
  return *count > 0 ? cudaSuccess : report(cudaErrorNoDevice);
}

PRETENDED_CUDA_API cudaError_t cudaGetDevice(int* device) {
  *device = chosen_device;
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaSetDevice(int device) {
  if (!is_device(device)) return cudaErrorInvalidDevice;
  chosen_device = device;
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (!is_device(device)) return cudaErrorInvalidDevice;
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "Pretended CUDA device");
  properties->uuid.bytes[sizeof properties->uuid.bytes - 1] = static_cast<char>(device + 1);
  properties->totalGlobalMem = Memory::instance().limit();
  properties->sharedMemPerBlock = kSharedPerBlock;
  properties->sharedMemPerBlockOptin = kSharedPerBlockOptin;
  properties->sharedMemPerMultiprocessor = 228 * 1024;
  properties->regsPerBlock = properties->regsPerMultiprocessor = kRegisters;
  properties->warpSize = kWarp;
  properties->maxThreadsPerBlock = kMaxThreadsPerBlock;
  properties->maxThreadsPerMultiProcessor = kMaxThreadsPerMultiprocessor;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = kMaxThreadsPerBlock;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 0x7fffffff;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->totalConstMem = 65536;
  properties->major = capability() / 10;
  properties->minor = capability() % 10;
  properties->textureAlignment = 512;
  properties->memPitch = 0x7fffffff;
  properties->multiProcessorCount = kMultiprocessors;
  properties->l2CacheSize = 50 << 20;
  properties->pciBusID = device + 1;
  properties->asyncEngineCount = 3;
  properties->canMapHostMemory = properties->concurrentKernels = properties->unifiedAddressing = 1;
  properties->streamPrioritiesSupported = properties->cooperativeLaunch = 1;
  properties->hostRegisterSupported = 1;
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute,
                                                      int device) {
  if (!is_device(device)) return cudaErrorInvalidDevice;
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = kMultiprocessors;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = capability() / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = capability() % 10;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = kMaxThreadsPerBlock;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = kMaxThreadsPerMultiprocessor;
      break;
    case cudaDevAttrWarpSize:
      *value = kWarp;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = kSharedPerBlock;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = kSharedPerBlockOptin;
      break;
    case cudaDevAttrMaxRegistersPerBlock:
      *value = kRegisters;
      break;
    case cudaDevAttrMaxGridDimX:
      *value = 0x7fffffff;
      break;
    case cudaDevAttrUnifiedAddressing:
      *value = 1;
      break;
    default:
      std::fprintf(stderr, "pretended CUDA: cudaDeviceGetAttribute does not know attribute %d.\n",
                   static_cast<int>(attribute));
      return report(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (!is_device(device) || !is_device(peer)) return cudaErrorInvalidDevice;
  *can = device != peer ? 1 : 0;
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  return is_device(peer) ? cudaSuccess : cudaErrorInvalidDevice;
}

PRETENDED_CUDA_API cudaError_t cudaDeviceGetPCIBusId(char* words, int length, int device) {
  if (!is_device(device)) return cudaErrorInvalidDevice;
  std::snprintf(words, static_cast<std::size_t>(length), "0000:%02x:00.0", device + 1);
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaDriverGetVersion(int* version) {
  *version = kRuntimeVersion;
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kRuntimeVersion;
  return cudaSuccess;
}

/// torch asks for functions that it can do without.
PRETENDED_CUDA_API cudaError_t
cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                 cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (result != nullptr) *result = cudaDriverEntryPointSymbolNotFound;
  return report(cudaErrorSymbolNotFound);
}

PRETENDED_CUDA_API cudaError_t cudaProfilerStart() { return cudaSuccess; }
PRETENDED_CUDA_API cudaError_t cudaProfilerStop() { return cudaSuccess; }
