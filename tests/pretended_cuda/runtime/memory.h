// SPDX-License-Identifier: BSD-3-Clause
// The device's memory, which is the host's, and what is known of every address.
#pragma once

#include <signal.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

namespace pretended_cuda {

enum class MemoryKind { kDevice, kPinned };

struct Allocation {
  std::uintptr_t begin = 0;
  std::size_t bytes = 0;
  MemoryKind kind = MemoryKind::kDevice;
  int device = 0;
  void* mapping = nullptr;  ///< with the guard pages; null: the memory is the caller's
};

/// Note [A device pointer is not the host's]
/// Memory of the device starts as 0xff bytes (NaN in every floating-point type) and lies between
/// pages that nothing may touch. With PRETENDED_CUDA_PROTECT=1 the host may not touch it either: it
/// is opened while work runs, and a host access in between ends the program with a sentence and its
/// address.
class Memory {
 public:
  static Memory& instance();

  /// Null if the limit does not allow it, or the machine.
  void* allocate_device(std::size_t bytes, int device);
  void* allocate_pinned(std::size_t bytes, int device);
  /// Memory of the caller's becomes pinned memory. False if a part of it is known already.
  bool register_host(void* begin, std::size_t bytes, int device);
  /// False if no allocation of that kind begins there.
  bool release(void* begin, MemoryKind kind);

  /// The allocation that holds the address.
  std::optional<Allocation> find(const void* address);
  /// Whether so many bytes from there lie in one allocation, or in none.
  bool in_bounds(const void* address, std::size_t bytes);

  void set_limit(std::size_t bytes);
  [[nodiscard]] std::size_t limit();
  [[nodiscard]] std::size_t used(int device);

  void open();
  void close();

 private:
  Memory();
  void protect_all(int protection);
  static void explain_access(int signal, siginfo_t* info, void* context);

  std::mutex mutex_;
  std::map<std::uintptr_t, Allocation> allocations_;
  std::vector<std::size_t> used_;
  std::size_t limit_;
  bool protect_;
  int open_ = 0;
};

}  // namespace pretended_cuda
