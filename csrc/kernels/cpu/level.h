// SPDX-License-Identifier: BSD-3-Clause
// Common includes, macros and helpers for the vectors of every instruction level.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/common/exp.h"
#include "kernels/common/float16.h"
#include "kernels/common/math.h"
#include "kernels/common/param_remainder.h"
#include "kernels/common/stochastic_rounding.h"

#ifndef TORCHFUSE_ISA_NAMESPACE
#error "compile once per instruction level, with TORCHFUSE_ISA_NAMESPACE set"
#endif

#define TORCHFUSE_INLINE inline __attribute__((always_inline))

namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE {

template <class T>
TORCHFUSE_INLINE T magnitude(T x) {
  return x < T(0) ? -x : x;
}

}  // namespace torchfuse::kernels::cpu::TORCHFUSE_ISA_NAMESPACE
