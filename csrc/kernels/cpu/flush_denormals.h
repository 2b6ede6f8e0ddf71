// SPDX-License-Identifier: BSD-3-Clause
// The CPU's side of -ftz=true.
#pragma once

#if defined(__aarch64__)
#include <cstdint>
#else
#include <xmmintrin.h>
#endif

#include "kernels/common/macros.h"

namespace torchfuse::kernels::cpu {

/// Treats denormals as zero, on input and output, for its own lifetime: they cost 20 to 30 times a
/// normal operation, and a decaying moment stays denormal for ever. Matches -ftz=true on the
/// device, which concerns fp32 alone: fp64 kernels do not use it. The compiler does not know that
/// arithmetic depends on it, so the arithmetic belongs into a function that is not inlined.
class FlushDenormals {
 public:
  TORCHFUSE_HOST_DEVICE FlushDenormals() : saved_(control()) { set_control(saved_ | kFlush); }
  TORCHFUSE_HOST_DEVICE ~FlushDenormals() { set_control(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
#if defined(__aarch64__)
  /// FZ: results count as denormal before they are rounded. Half precision is a format of storage
  /// here, and conversions keep its denormals.
  using Control = std::uint64_t;
  static constexpr Control kFlush = Control{1} << 24;
  TORCHFUSE_HOST_DEVICE static Control control() {
    Control bits;
    asm volatile("mrs %0, fpcr" : "=r"(bits));
    return bits;
  }
  TORCHFUSE_HOST_DEVICE static void set_control(Control bits) {
    asm volatile("msr fpcr, %0" : : "r"(bits) : "memory");
  }
#else
  /// FTZ and DAZ: results count as denormal after they are rounded.
  using Control = unsigned;
  static constexpr Control kFlush = 0x8040;
  TORCHFUSE_HOST_DEVICE static Control control() { return _mm_getcsr(); }
  TORCHFUSE_HOST_DEVICE static void set_control(Control bits) { _mm_setcsr(bits); }
#endif

  Control saved_;
};

}  // namespace torchfuse::kernels::cpu
