// SPDX-License-Identifier: BSD-3-Clause
// The device that the launchers of csrc/kernels run on in these tests. The same tests are built
// twice: against the kernels' source compiled for the CPU (device_on_cpu.cpp, see
// tests/cpp/cuda_on_cpu/README.md), and against the real ones (device_on_gpu.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "../kernel_test.h"
#include "kernels/common/status.h"
#include "kernels/common/stream.h"

namespace torchfuse::kernels::testing {

/// True where device memory is the CPU's: costs are those of a CPU, and accesses are counted.
bool device_is_cpu();

/// The stream that tests launch on.
Stream stream();

/// Waits for the stream, and fails the test if a kernel failed.
void synchronize();

/// Fails the test unless the launch was taken, and waits for it.
inline void expect_ok(const Status& status) {
  ASSERT_TRUE(status.ok()) << status.what << ": error " << status.error;
  synchronize();
}

inline void expect_refused(const Status& status, const char* what) {
  EXPECT_FALSE(status.ok());
  EXPECT_STREQ(status.what, what);
}

/// Multiprocessors that the kernels are told of: few, so that a launch has few blocks.
inline constexpr int kMultiprocessors = 2;

/// How the CPU runs what is launched from now on; nothing on a GPU, which does as it likes.
struct Order {
  std::uint64_t seed = 0;             ///< of blocks and threads; 0: ascending
  std::uint32_t resident_blocks = 2;  ///< that run interleaved
  bool flush_denormals = true;        ///< false for fp64 kernels
};
void set_order(const Order& order);

/// Memory of the device, with forbidden memory around it that accesses are caught in: at once on
/// the CPU, by a changed margin on a GPU. Starts filled with 0xff bytes, a NaN in every format.
/// On a GPU with TORCHFUSE_EXACT_ALLOCATIONS=1 neither, so that compute-sanitizer sees what
/// happens: an access outside is one outside of every allocation, and what was not written is not
/// initialized.
class DeviceMemory {
 public:
  /// Which end is as near to an inaccessible page as the alignment allows (on the CPU).
  enum class Guard { kBegin, kEnd };

  /// `misalignment`: the address modulo 16.
  explicit DeviceMemory(std::size_t bytes, std::size_t misalignment = 0, Guard guard = Guard::kEnd);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&&) noexcept;
  DeviceMemory& operator=(DeviceMemory&&) noexcept;

  void* data() const;
  std::size_t bytes() const;
  void upload(const void* source) const;
  void download(void* target) const;

  /// Fails the test if memory around has changed.
  void expect_margins_intact() const;

  /// Fails the test unless kernels read and wrote each byte so many times since the last upload
  /// or construction. Says nothing where accesses are not counted.
  void expect_accesses(unsigned reads, unsigned writes) const;
  /// Load and store instructions since then; 0 where they are not counted.
  std::size_t loads() const;
  std::size_t stores() const;
  /// Addresses that were prefetched.
  std::size_t prefetches() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Whether expect_accesses() and loads() count here.
bool accesses_are_counted();

/// A tensor on the device, `offset` elements behind a 16-byte boundary.
class DeviceTensor : public DeviceMemory {
 public:
  using Guard = DeviceMemory::Guard;

  explicit DeviceTensor(const Buffer& host, std::int64_t offset = 0, Guard guard = Guard::kEnd)
      : DeviceTensor(host.dtype(), host.numel(), offset, guard) {
    upload(host.data());
  }

  /// For what a kernel writes: nothing is uploaded, so that no read ahead of that is hidden.
  static DeviceTensor unwritten(DType dtype, std::int64_t numel, std::int64_t offset = 0) {
    return DeviceTensor(dtype, numel, offset, Guard::kEnd);
  }

  DType dtype() const { return dtype_; }
  std::int64_t numel() const { return numel_; }

  Buffer to_host() const {
    Buffer host(dtype_, numel_);
    download(host.data());
    return host;
  }

 private:
  DeviceTensor(DType dtype, std::int64_t numel, std::int64_t offset, Guard guard)
      : DeviceMemory(static_cast<std::size_t>(numel) * size_of(dtype),
                     static_cast<std::size_t>(offset) * size_of(dtype) % 16, guard),
        dtype_(dtype),
        numel_(numel) {}

  DType dtype_;
  std::int64_t numel_;
};

/// Plain values on the device: partials, step counts, flags.
template <class T>
class DeviceArray : public DeviceMemory {
 public:
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(Size{}, host.size()) {
    upload(host.data());
  }

  /// As DeviceTensor::unwritten.
  static DeviceArray unwritten(std::int64_t size) {
    return DeviceArray(Size{}, static_cast<std::size_t>(size));
  }

  T* data() const { return static_cast<T*>(DeviceMemory::data()); }

  std::vector<T> to_host() const {
    std::vector<T> host(size_);
    download(host.data());
    return host;
  }

 private:
  struct Size {};  // a list of one number would be a size
  DeviceArray(Size, std::size_t size) : DeviceMemory(size * sizeof(T)), size_(size) {}

  std::size_t size_;
};

}  // namespace torchfuse::kernels::testing
