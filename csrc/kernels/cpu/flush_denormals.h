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

/// Treats denormals as zero, on input and output, during the object's lifetime. Denormals cost 20
/// to 30 times a normal operation, and a decaying moment would stay denormal for ever. Matches
/// -ftz=true on the device, which only affects fp32: fp64 kernels do not use this class. The
/// compiler does not know that arithmetic depends on the flag, so the arithmetic must be in a
/// function that is not inlined.
class FlushDenormals {
 public:
  TORCHFUSE_HOST_DEVICE FlushDenormals() : saved_(control()) { set_control(saved_ | kFlush); }
  TORCHFUSE_HOST_DEVICE ~FlushDenormals() { set_control(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
#if defined(__aarch64__)
  /// FZ: a result is a denormal if it is denormal before rounding. Half precision is only a storage
  /// format here, and conversions keep half-precision denormals.
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
  /// FTZ and DAZ: a result is a denormal if it is denormal after rounding.
  using Control = unsigned;
  static constexpr Control kFlush = 0x8040;
  TORCHFUSE_HOST_DEVICE static Control control() { return _mm_getcsr(); }
  TORCHFUSE_HOST_DEVICE static void set_control(Control bits) { _mm_setcsr(bits); }
#endif

  Control saved_;
};

}  // namespace torchfuse::kernels::cpu
