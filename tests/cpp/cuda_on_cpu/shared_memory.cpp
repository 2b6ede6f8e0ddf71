// SPDX-License-Identifier: BSD-3-Clause
#include "shared_memory.h"

#include <algorithm>
#include <cstring>

#include "grid.h"
#include "kernels/common/shared.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) \
  (static_cast<void>(address), static_cast<void>(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) \
  (static_cast<void>(address), static_cast<void>(bytes))
#endif

namespace cuda_on_cpu {
namespace {

/// As a floating-point number of any width a NaN, as an integer large.
constexpr int kUninitialized = 0xff;
constexpr std::size_t kAlignment = 64;
/// Distinct objects of a block; each has up to two alignments of guarded space behind it.
constexpr std::size_t kMaxObjects = 16;
constexpr std::size_t kMaxBytes = 48 * 1024;
constexpr std::size_t kMemoryBytes = kMaxBytes + (2 * kMaxObjects + 3) * kAlignment;

}  // namespace

// All memory is allocated here, by the scheduler: were it allocated by the first thread that asks,
// a race detector would take the other threads' accesses for races with the allocation.
SharedMemory::SharedMemory() : memory_(std::make_unique_for_overwrite<std::byte[]>(kMemoryBytes)) {
  std::memset(memory_.get(), kUninitialized, kMemoryBytes);
  objects_.reserve(kMaxObjects);
  ASAN_POISON_MEMORY_REGION(memory_.get(), kMemoryBytes);
}

SharedMemory::~SharedMemory() { ASAN_UNPOISON_MEMORY_REGION(memory_.get(), kMemoryBytes); }

std::byte* SharedMemory::take(std::size_t bytes) {
  const std::uintptr_t base = reinterpret_cast<std::uintptr_t>(memory_.get());
  const std::uintptr_t begin = (base + taken_ + kAlignment - 1) / kAlignment * kAlignment;
  taken_ = begin - base + bytes + kAlignment;
  std::byte* const object = memory_.get() + (begin - base);
  ASAN_UNPOISON_MEMORY_REGION(object, bytes);
  return object;
}

void* SharedMemory::object(const void* key, std::size_t bytes) {
  for (const Object& object : objects_) {
    if (object.key == key) return object.bytes;
  }
  bytes_ += bytes;
  if (bytes_ > kMaxBytes) {
    fault("%zu bytes of static shared memory, the limit is %zu", bytes_, kMaxBytes);
  }
  if (objects_.size() == kMaxObjects) fault("more than %zu objects in shared memory", kMaxObjects);
  objects_.push_back({key, take(bytes)});
  return objects_.back().bytes;
}

}  // namespace cuda_on_cpu

namespace torchfuse::kernels {

void* block_shared_storage(const void* key, std::size_t bytes) {
  return cuda_on_cpu::shared_of_running_block().object(key, bytes);
}

}  // namespace torchfuse::kernels
