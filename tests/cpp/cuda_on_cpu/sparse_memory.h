// SPDX-License-Identifier: BSD-3-Clause
// Tensors larger than memory, of which a few parts exist. Everything else is inaccessible: an index
// that has lost its high bits ends the test where it is used.
#pragma once

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

#include "kernels/kernel_test.h"

namespace cuda_on_cpu {

class SparseMemory {
 public:
  explicit SparseMemory(std::size_t bytes) : bytes_((bytes + kPage - 1) / kPage * kPage) {
    void* const mapping =
        mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) fail("addresses for a large tensor");
    data_ = static_cast<unsigned char*>(mapping);
  }
  ~SparseMemory() { munmap(data_, bytes_); }
  SparseMemory(const SparseMemory&) = delete;
  SparseMemory& operator=(const SparseMemory&) = delete;

  unsigned char* data() const { return data_; }

  /// Makes the pages of bytes [begin, end) accessible. Fresh ones are zero.
  void open(std::size_t begin, std::size_t end) const {
    begin = begin / kPage * kPage;
    if (mprotect(data_ + begin, end - begin, PROT_READ | PROT_WRITE) != 0) {
      fail("a part of a large tensor");
    }
  }

 private:
  static constexpr std::size_t kPage = 4096;

  [[noreturn]] static void fail(const char* what) {
    std::perror(what);
    std::abort();
  }

  std::size_t bytes_;
  unsigned char* data_ = nullptr;
};

/// A tensor in such memory, `offset` elements behind a 16-byte boundary.
class SparseTensor {
 public:
  using Buffer = torchfuse::kernels::testing::Buffer;

  SparseTensor(torchfuse::kernels::DType dtype, std::int64_t numel, std::int64_t offset)
      : dtype_(dtype), numel_(numel), offset_(offset), memory_(position(numel)) {}

  void* data() const { return memory_.data() + position(0); }
  std::int64_t numel() const { return numel_; }

  /// Makes elements from `first` on exist, with this content.
  void write(std::int64_t first, const Buffer& content) const {
    const std::size_t end = position(first + content.numel());
    memory_.open(position(first), end);
    std::memcpy(memory_.data() + position(first), content.data(), end - position(first));
  }

  Buffer read(std::int64_t first, std::int64_t count) const {
    Buffer content(dtype_, count);
    std::memcpy(content.data(), memory_.data() + position(first),
                position(first + count) - position(first));
    return content;
  }

 private:
  std::size_t position(std::int64_t element) const {
    return static_cast<std::size_t>(offset_ + element) * torchfuse::kernels::size_of(dtype_);
  }

  torchfuse::kernels::DType dtype_;
  std::int64_t numel_;
  std::int64_t offset_;
  SparseMemory memory_;
};

}  // namespace cuda_on_cpu
