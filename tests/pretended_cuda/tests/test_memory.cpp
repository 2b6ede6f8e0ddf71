// SPDX-License-Identifier: BSD-3-Clause
// Allocations, copies, pinned memory, and what is known of an address.
#include <cmath>
#include <cstring>

#include "runtime_testing.h"

namespace pretended_cuda::testing {
namespace {

using Memory = Runtime;
using LazyMemory = LazyRuntime;

template <class T>
T* allocate(std::size_t count) {
  void* begin = nullptr;
  EXPECT_EQ(cudaMalloc(&begin, count * sizeof(T)), cudaSuccess);
  return static_cast<T*>(begin);
}

TEST_F(Memory, StartsAsNaN) {
  float* const memory = allocate<float>(1000);
  std::vector<float> values(1000);
  EXPECT_EQ(cudaMemcpy(values.data(), memory, 4000, cudaMemcpyDeviceToHost), cudaSuccess);
  for (const float value : values) ASSERT_TRUE(std::isnan(value));
  EXPECT_EQ(cudaFree(memory), cudaSuccess);
  EXPECT_EQ(cudaFree(memory), cudaErrorInvalidValue) << "freed twice";
}

TEST_F(Memory, IsLimited) {
  pretended_cuda_set_memory(1 << 20);
  std::size_t free = 0;
  std::size_t total = 0;
  EXPECT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
  EXPECT_EQ(total, std::size_t{1} << 20);
  char* const half = allocate<char>(1 << 19);
  void* more = &free;
  EXPECT_EQ(cudaMalloc(&more, 3 << 18), cudaErrorMemoryAllocation);
  EXPECT_EQ(more, nullptr);
  EXPECT_EQ(cudaSetDevice(1), cudaSuccess);
  char* const elsewhere = allocate<char>(3 << 18);
  EXPECT_EQ(cudaFree(elsewhere), cudaSuccess);
  EXPECT_EQ(cudaFree(half), cudaSuccess);
}

TEST_F(Memory, AddressesAreKnown) {
  char* const device = allocate<char>(100);
  void* pinned = nullptr;
  EXPECT_EQ(cudaHostAlloc(&pinned, 100, cudaHostAllocDefault), cudaSuccess);
  char own[100];
  cudaPointerAttributes attributes;
  EXPECT_EQ(cudaPointerGetAttributes(&attributes, device + 99), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  EXPECT_EQ(attributes.device, 0);
  EXPECT_EQ(attributes.devicePointer, device + 99);
  EXPECT_EQ(attributes.hostPointer, nullptr);
  EXPECT_EQ(cudaPointerGetAttributes(&attributes, pinned), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  EXPECT_EQ(cudaPointerGetAttributes(&attributes, own), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);
  EXPECT_EQ(cudaHostRegister(own, sizeof own, 0), cudaSuccess);
  EXPECT_EQ(cudaHostRegister(own + 1, 1, 0), cudaErrorHostMemoryAlreadyRegistered);
  EXPECT_EQ(cudaPointerGetAttributes(&attributes, own + 50), cudaSuccess);
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  EXPECT_EQ(cudaHostUnregister(own), cudaSuccess);
  EXPECT_EQ(cudaHostUnregister(own), cudaErrorHostMemoryNotRegistered);
  EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
  EXPECT_EQ(cudaFree(device), cudaSuccess);
}

TEST_F(Memory, CopiesThatNameTheWrongSideAreRefused) {
  char* const device = allocate<char>(8);
  char host[16] = {};
  EXPECT_EQ(cudaMemcpy(device, host, 8, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host, device, 8, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host, device, 8, cudaMemcpyDeviceToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(device, host, 9, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(device, 0, 9), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(device), cudaSuccess);
}

TEST_P(LazyMemory, PinnedMemoryIsReadWhenTheStreamComesToIt) {
  char* const device = allocate<char>(4);
  void* begin = nullptr;
  cudaHostAlloc(&begin, 4, cudaHostAllocDefault);
  char* const pinned = static_cast<char*>(begin);
  char pageable[4] = {'a', 'a', 'a', 'a'};
  std::memset(pinned, 'a', 4);
  cudaStream_t stream = make_stream();
  EXPECT_EQ(cudaMemcpyAsync(device, pinned, 4, cudaMemcpyHostToDevice, stream), cudaSuccess);
  std::memset(pinned, 'b', 4);  // too early
  char read[4] = {};
  EXPECT_EQ(cudaMemcpyAsync(read, device, 4, cudaMemcpyDeviceToHost, stream), cudaSuccess);
  EXPECT_EQ(read[0], 'b') << "a copy into pageable memory waits";
  EXPECT_EQ(cudaMemcpyAsync(device, pageable, 4, cudaMemcpyHostToDevice, stream), cudaSuccess);
  std::memset(pageable, 'b', 4);
  EXPECT_EQ(cudaMemcpyAsync(pinned, device, 4, cudaMemcpyDeviceToHost, stream), cudaSuccess);
  EXPECT_EQ(pinned[0], 'b') << "read too early";
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(pinned[0], 'a') << "pageable memory was read at once";
  cudaFreeHost(pinned);
  cudaFree(device);
}

TEST_P(LazyMemory, FreeingWaits) {
  char* const device = allocate<char>(4);
  cudaStream_t stream = make_stream();
  submit(stream, note("work"));
  EXPECT_EQ(cudaFree(device), cudaSuccess);
  EXPECT_EQ(log.size(), 1u);
}

INSTANTIATE_TEST_SUITE_P(Seeds, LazyMemory, ::testing::Values(1u, 2u, 3u));

}  // namespace
}  // namespace pretended_cuda::testing
