// SPDX-License-Identifier: BSD-3-Clause
#include "memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "device.h"

namespace pretended_cuda {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kDefaultLimit = std::size_t{6} << 30;
/// Of larger allocations only both ends are filled: untouched pages cost no memory.
constexpr std::size_t kFilledBytes = std::size_t{64} << 20;

std::size_t in_pages(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

struct sigaction previous_action = {};

}  // namespace

Memory& Memory::instance() {
  static auto* const memory = new Memory;  // never destroyed, as the scheduler
  return *memory;
}

Memory::Memory()
    : used_(static_cast<std::size_t>(device_count())),
      limit_(setting("PRETENDED_CUDA_MEMORY", kDefaultLimit)),
      protect_(setting("PRETENDED_CUDA_PROTECT", 0) != 0) {
  if (!protect_) return;
  struct sigaction action = {};
  action.sa_sigaction = explain_access;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, &previous_action);
}

void* Memory::allocate_device(std::size_t bytes, int device) {
  const std::lock_guard lock(mutex_);
  std::size_t& used = used_[static_cast<std::size_t>(device)];
  if (bytes > limit_ || used > limit_ - bytes) return nullptr;
  const std::size_t inner = in_pages(bytes);
  void* const mapping = mmap(nullptr, inner + 2 * kPage, PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) return nullptr;
  char* const begin = static_cast<char*>(mapping) + kPage;
  mprotect(begin, inner, PROT_READ | PROT_WRITE);
  if (bytes <= kFilledBytes) {
    std::memset(begin, 0xff, inner);
  } else {
    std::memset(begin, 0xff, kPage);
    std::memset(begin + inner - kPage, 0xff, kPage);
  }
  if (protect_ && open_ == 0) mprotect(begin, inner, PROT_NONE);
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  allocations_[address] = {address, bytes, MemoryKind::kDevice, device, mapping};
  used += bytes;
  return begin;
}

void* Memory::allocate_pinned(std::size_t bytes, int device) {
  void* const begin =
      mmap(nullptr, in_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (begin == MAP_FAILED) return nullptr;
  std::memset(begin, 0xff, in_pages(bytes));
  const std::lock_guard lock(mutex_);
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  allocations_[address] = {address, bytes, MemoryKind::kPinned, device, begin};
  return begin;
}

bool Memory::register_host(void* begin, std::size_t bytes, int device) {
  if (find(begin) || find(static_cast<char*>(begin) + bytes - 1)) return false;
  const std::lock_guard lock(mutex_);
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  allocations_[address] = {address, bytes, MemoryKind::kPinned, device, nullptr};
  return true;
}

bool Memory::release(void* begin, MemoryKind kind) {
  const std::lock_guard lock(mutex_);
  const auto at = allocations_.find(reinterpret_cast<std::uintptr_t>(begin));
  if (at == allocations_.end() || at->second.kind != kind) return false;
  const Allocation allocation = at->second;
  allocations_.erase(at);
  if (kind == MemoryKind::kDevice) {
    used_[static_cast<std::size_t>(allocation.device)] -= allocation.bytes;
    munmap(allocation.mapping, in_pages(allocation.bytes) + 2 * kPage);
  } else if (allocation.mapping != nullptr) {
    munmap(allocation.mapping, in_pages(allocation.bytes));
  }
  return true;
}

std::optional<Allocation> Memory::find(const void* address) {
  const std::lock_guard lock(mutex_);
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  auto next = allocations_.upper_bound(at);
  if (next == allocations_.begin()) return std::nullopt;
  const Allocation& allocation = std::prev(next)->second;
  if (at >= allocation.begin + allocation.bytes) return std::nullopt;
  return allocation;
}

bool Memory::in_bounds(const void* address, std::size_t bytes) {
  const auto allocation = find(address);
  if (!allocation) return true;
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  return bytes <= allocation->begin + allocation->bytes - at;
}

void Memory::set_limit(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  limit_ = bytes == 0 ? setting("PRETENDED_CUDA_MEMORY", kDefaultLimit) : bytes;
}

std::size_t Memory::limit() {
  const std::lock_guard lock(mutex_);
  return limit_;
}

std::size_t Memory::used(int device) {
  const std::lock_guard lock(mutex_);
  return used_[static_cast<std::size_t>(device)];
}

void Memory::protect_all(int protection) {
  for (const auto& [address, allocation] : allocations_) {
    if (allocation.kind != MemoryKind::kDevice) continue;
    mprotect(reinterpret_cast<void*>(address), in_pages(allocation.bytes), protection);
  }
}

void Memory::open() {
  if (!protect_) return;
  const std::lock_guard lock(mutex_);
  if (open_++ == 0) protect_all(PROT_READ | PROT_WRITE);
}

void Memory::close() {
  if (!protect_) return;
  const std::lock_guard lock(mutex_);
  if (--open_ == 0) protect_all(PROT_NONE);
}

// The access was the program's last: whatever is read here can stay as it is, and no lock is taken.
void Memory::explain_access(int, siginfo_t* info, void*) {
  const auto at = reinterpret_cast<std::uintptr_t>(info->si_addr);
  for (const auto& [address, allocation] : instance().allocations_) {
    const bool device = allocation.kind == MemoryKind::kDevice;
    if (!device || at < address || at >= address + in_pages(allocation.bytes)) continue;
    char words[160];
    const int length = std::snprintf(
        words, sizeof words,
        "pretended CUDA: the host touched memory of device %d: byte %zu of an allocation of %zu.\n",
        allocation.device, static_cast<std::size_t>(at - address), allocation.bytes);
    if (write(STDERR_FILENO, words, static_cast<std::size_t>(length)) < 0) break;
  }
  sigaction(SIGSEGV, &previous_action, nullptr);  // the access is made again, and ends the program
}

}  // namespace pretended_cuda

PRETENDED_CUDA_API void pretended_cuda_open_memory() { pretended_cuda::Memory::instance().open(); }
PRETENDED_CUDA_API void pretended_cuda_close_memory() {
  pretended_cuda::Memory::instance().close();
}
PRETENDED_CUDA_API void pretended_cuda_set_memory(unsigned long long bytes) {
  pretended_cuda::Memory::instance().set_limit(bytes);
}
