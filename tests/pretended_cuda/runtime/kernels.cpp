// SPDX-License-Identifier: BSD-3-Clause
// What nvcc's code calls when a library is loaded and when it launches. Kernels that were compiled
// for a device are known by name and cannot run: a launch is an error that names the kernel.
#include <cxxabi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device.h"
#include "pretended_cuda.h"

using namespace pretended_cuda;

namespace {

struct Variable {
  std::string name;
  std::vector<char> bytes;
};

struct Registry {
  std::mutex mutex;
  std::map<const void*, std::string> kernels;
  std::map<const void*, Variable> variables;
};

Registry& registry() {
  static auto* const registry = new Registry;  // libraries register before main and after exit
  return *registry;
}

std::string demangle(const std::string& name) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> words(
      abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status), &std::free);
  return status == 0 ? words.get() : name;
}

cudaError_t launch(const void* kernel, cudaStream_t stream) {
  if (const cudaError_t error = fault()) return error;
  std::string name = "an unregistered kernel";
  {
    Registry& known = registry();
    const std::lock_guard lock(known.mutex);
    const auto at = known.kernels.find(kernel);
    if (at != known.kernels.end()) name = demangle(at->second);
  }
  // torch.cuda._sleep: time passes anyway.
  if (name.find("spin_kernel") != std::string::npos) {
    const pretended_cuda_work work{"spin_kernel", [](void*) { return 1; }, [](void*) {}, nullptr,
                                   0};
    return pretended_cuda_submit(stream, &work);
  }
  std::fprintf(stderr, "pretended CUDA lacks the kernel %s: redirect its op.\n", name.c_str());
  return report(cudaErrorInvalidDeviceFunction);
}

struct Configuration {
  dim3 grid, block;
  std::size_t shared_bytes;
  void* stream;
};
thread_local std::vector<Configuration> configurations;

}  // namespace

PRETENDED_CUDA_API void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
PRETENDED_CUDA_API void __cudaRegisterFatBinaryEnd(void**) {}
PRETENDED_CUDA_API void __cudaUnregisterFatBinary(void**) {}
PRETENDED_CUDA_API char __cudaInitModule(void**) { return 1; }

PRETENDED_CUDA_API void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name,
                                               int, uint3*, uint3*, dim3*, dim3*, int*) {
  const std::lock_guard lock(registry().mutex);
  registry().kernels[kernel] = name;
}

PRETENDED_CUDA_API void __cudaRegisterVar(void**, char* variable, char*, const char* name, int,
                                          std::size_t bytes, int, int) {
  const std::lock_guard lock(registry().mutex);
  registry().variables[variable] = {name, std::vector<char>(bytes)};
}

PRETENDED_CUDA_API cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  const std::lock_guard lock(registry().mutex);
  const auto at = registry().variables.find(symbol);
  if (at == registry().variables.end()) return report(cudaErrorInvalidSymbol);
  *address = at->second.bytes.data();
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from,
                                                  std::size_t bytes, std::size_t offset,
                                                  cudaMemcpyKind) {
  void* address = nullptr;
  if (const cudaError_t error = cudaGetSymbolAddress(&address, symbol)) return error;
  std::memcpy(static_cast<char*>(address) + offset, from, bytes);
  return cudaSuccess;
}

PRETENDED_CUDA_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block,
                                                        std::size_t shared_bytes, void* stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}

PRETENDED_CUDA_API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block,
                                                          std::size_t* shared_bytes, void* stream) {
  if (configurations.empty()) return report(cudaErrorMissingConfiguration);
  const Configuration& last = configurations.back();
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *static_cast<void**>(stream) = last.stream;
  configurations.pop_back();
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**,
                                                  std::size_t, cudaStream_t stream) {
  return launch(kernel, stream);
}

PRETENDED_CUDA_API cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, std::size_t,
                                                cudaStream_t stream) {
  return launch(kernel, stream);
}

PRETENDED_CUDA_API cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3, dim3, void**,
                                                           std::size_t, cudaStream_t stream) {
  return launch(kernel, stream);
}

PRETENDED_CUDA_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration,
                                                   const void* kernel, void**) {
  return launch(kernel, configuration->stream);
}

PRETENDED_CUDA_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void*, int threads, std::size_t, unsigned) {
  *blocks = threads > 0 ? std::max(1, 2048 / threads) : 0;
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int* blocks, const void* kernel, int threads, std::size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, threads,
                                                                shared_bytes, 0);
}
