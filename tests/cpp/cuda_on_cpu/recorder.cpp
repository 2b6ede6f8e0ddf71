// SPDX-License-Identifier: BSD-3-Clause
#include "recorder.h"

#include <cstdio>
#include <cstdlib>
#include <map>

#include "engine.h"
#include "grid.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace cuda_on_cpu {
namespace {

struct Range {
  std::uintptr_t begin = 0;
  std::size_t bytes = 0;
  AccessCounts counts;
};

std::map<std::uintptr_t, Range>& ranges() {
  static std::map<std::uintptr_t, Range> instance;  // by the first byte
  return instance;
}

Range* last_hit = nullptr;

Range& range_at(const void* begin) {
  const auto found = ranges().find(reinterpret_cast<std::uintptr_t>(begin));
  if (found == ranges().end()) {
    std::fprintf(stderr, "cuda_on_cpu: %p is not watched\n", begin);
    std::abort();
  }
  return found->second;
}

Range* find(std::uintptr_t address) {
  if (last_hit != nullptr && address - last_hit->begin < last_hit->bytes) return last_hit;
  const auto behind = ranges().upper_bound(address);
  if (behind == ranges().begin()) return nullptr;
  Range& range = std::prev(behind)->second;
  if (address - range.begin >= range.bytes) return nullptr;
  return last_hit = &range;
}

}  // namespace

void watch(const void* begin, std::size_t bytes) {
  if (bytes == 0) return;
  Range range{reinterpret_cast<std::uintptr_t>(begin), bytes, {}};
  range.counts.reads.resize(bytes);
  range.counts.writes.resize(bytes);
  range.counts.prefetched.resize(bytes);
  ranges()[range.begin] = std::move(range);
}

void unwatch(const void* begin) {
  last_hit = nullptr;
  ranges().erase(reinterpret_cast<std::uintptr_t>(begin));
}

const AccessCounts& counts_of(const void* begin) { return range_at(begin).counts; }

}  // namespace cuda_on_cpu

namespace torchfuse::kernels::cuda {

void prefetch(const unsigned char* address) {
  cuda_on_cpu::Range* const range = cuda_on_cpu::find(reinterpret_cast<std::uintptr_t>(address));
  if (range != nullptr) {
    range->counts.prefetched[reinterpret_cast<std::uintptr_t>(address) - range->begin] = true;
  }
#if defined(__SANITIZE_ADDRESS__)
  if (__asan_address_is_poisoned(address) != 0) {
    cuda_on_cpu::fault("a prefetch out of bounds, of %p", static_cast<const void*>(address));
  }
#endif
}

}  // namespace torchfuse::kernels::cuda

namespace cuda_on_cpu {

#if defined(CUDA_ON_CPU_RECORDER)

bool recorder_available() { return true; }

namespace {

enum class Access { kRead, kWrite };

void count(std::vector<std::uint8_t>& bytes, std::size_t first, std::size_t number) {
  for (std::size_t i = first; i < first + number && i < bytes.size(); ++i) {
    if (bytes[i] < 255) ++bytes[i];
  }
}

void record(Access access, const void* address, std::size_t bytes) {
  if (!in_kernel()) return;
  const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(address);
  Range* const range = find(first);
  if (range == nullptr) return;
  AccessCounts& counts = range->counts;
  if (access == Access::kRead) {
    ++counts.loads;
    count(counts.reads, first - range->begin, bytes);
  } else {
    ++counts.stores;
    count(counts.writes, first - range->begin, bytes);
  }
  maybe_switch_thread();
}

/// An access that the source makes in one piece.
void record_whole(Access access, const void* address, std::size_t bytes) {
  if (!in_kernel()) return;
  // On a device, a thread's variables are registers. The host's compiler may access several at
  // once.
  if (!on_running_stack(address)) require_aligned(address, bytes);
  record(access, address, bytes);
}

}  // namespace
}  // namespace cuda_on_cpu

using cuda_on_cpu::Access;

// The names that the compiler calls.
extern "C" {
#define CUDA_ON_CPU_RECORD(bytes)                                                                  \
  void __tsan_read##bytes(void* at) { cuda_on_cpu::record_whole(Access::kRead, at, bytes); }       \
  void __tsan_write##bytes(void* at) { cuda_on_cpu::record_whole(Access::kWrite, at, bytes); }     \
  void __tsan_unaligned_read##bytes(void* at) { cuda_on_cpu::record(Access::kRead, at, bytes); }   \
  void __tsan_unaligned_write##bytes(void* at) { cuda_on_cpu::record(Access::kWrite, at, bytes); } \
  void __tsan_volatile_read##bytes(void* at) { cuda_on_cpu::record(Access::kRead, at, bytes); }    \
  void __tsan_volatile_write##bytes(void* at) { cuda_on_cpu::record(Access::kWrite, at, bytes); }
CUDA_ON_CPU_RECORD(1)
CUDA_ON_CPU_RECORD(2)
CUDA_ON_CPU_RECORD(4)
CUDA_ON_CPU_RECORD(8)
CUDA_ON_CPU_RECORD(16)
#undef CUDA_ON_CPU_RECORD
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* at, std::size_t bytes) {
  cuda_on_cpu::record(Access::kRead, at, bytes);
}
void __tsan_write_range(void* at, std::size_t bytes) {
  cuda_on_cpu::record(Access::kWrite, at, bytes);
}
std::uint32_t __tsan_atomic32_fetch_add(volatile std::uint32_t* at, std::uint32_t value, int) {
  cuda_on_cpu::maybe_switch_thread();
  return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}
void __tsan_atomic32_store(volatile std::uint32_t* at, std::uint32_t value, int) {
  if (cuda_on_cpu::in_kernel()) {
    cuda_on_cpu::record(Access::kWrite, const_cast<std::uint32_t*>(at), sizeof value);
  }
  __atomic_store_n(at, value, __ATOMIC_SEQ_CST);
}
}

#else

bool recorder_available() { return false; }

}  // namespace cuda_on_cpu

#endif
