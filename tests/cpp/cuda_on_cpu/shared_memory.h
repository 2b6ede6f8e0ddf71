// SPDX-License-Identifier: BSD-3-Clause
// The shared memory of one block, filled with a pattern, because a device gives it uninitialized.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace cuda_on_cpu {

class SharedMemory {
 public:
  static constexpr std::size_t kMaxStaticBytes = 48 * 1024;
  static constexpr std::size_t kMaxBytes = 227 * 1024;

  explicit SharedMemory(std::size_t dynamic_bytes);
  ~SharedMemory();
  SharedMemory(SharedMemory&& other) = default;

  /// The static object known by `key`, with space behind it that a sanitizer guards.
  void* object(const void* key, std::size_t bytes);
  void* dynamic() { return dynamic_; }

 private:
  std::byte* take(std::size_t bytes);

  struct Object {
    const void* key;
    std::byte* bytes;
  };
  std::unique_ptr<std::byte[]> memory_;
  std::size_t memory_bytes_;
  std::size_t taken_ = 0;
  std::byte* dynamic_ = nullptr;
  std::size_t dynamic_bytes_;
  std::size_t static_bytes_ = 0;
  std::vector<Object> objects_;
};

SharedMemory& shared_of_running_block();

}  // namespace cuda_on_cpu
