// SPDX-License-Identifier: BSD-3-Clause
// The shared memory of one block, filled with a pattern, because a device gives it uninitialized.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace cuda_on_cpu {

class SharedMemory {
 public:
  SharedMemory();
  ~SharedMemory();

  /// The object known by `key`, with space behind it that a sanitizer guards.
  void* object(const void* key, std::size_t bytes);

 private:
  std::byte* take(std::size_t bytes);

  struct Object {
    const void* key;
    std::byte* bytes;
  };
  std::unique_ptr<std::byte[]> memory_;
  std::size_t taken_ = 0;
  std::size_t bytes_ = 0;  ///< of all objects
  std::vector<Object> objects_;
};

SharedMemory& shared_of_running_block();

}  // namespace cuda_on_cpu
