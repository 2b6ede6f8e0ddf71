// SPDX-License-Identifier: BSD-3-Clause
// What vectors can do, term by term, at every instruction level: vector_terms.cpp is compiled once
// per level, as the kernels are.
#pragma once

#include <cstdint>

#include "kernels/common/float16.h"
#include "kernels/common/stochastic_rounding.h"
#include "kernels/cpu/isa.h"

namespace torchfuse::kernels::testing {

/// Numbers to compute with; `count` is a multiple of every width.
template <class T>
struct TermInputs {
  const T *a, *b, *c;
  std::int64_t count;
};

/// In the order of the results of apply_terms(), which has `count` of each.
inline constexpr const char* kTerms[] = {"a + b",
                                         "a - b",
                                         "a * b",
                                         "a / b",
                                         "sqrt(a)",
                                         "fma(a, b, c)",
                                         "max(a, b)",
                                         "sign(a)",
                                         "pass_where_positive(a, b)",
                                         "reaches(a)",
                                         "larger_magnitude(a, b)"};

/// Floats as they are stored in 16 bits.
struct Stored {
  BFloat16* nearest;
  BFloat16* nearest_in_pairs;  ///< of vectors, at levels that have them
  BFloat16* stochastic;
  Half* half;
  BFloat16* param;
  std::int16_t* remainder;
};
inline constexpr RoundingKey kStoredKey{0x12345678, 0x9abcdef0};
/// The first element's number. The 73rd after it needs a carry beyond 32 bits, inside of a vector.
inline constexpr std::uint64_t kStoredElement = 0x1ffffffb7;

}  // namespace torchfuse::kernels::testing

namespace torchfuse::kernels {

#define TORCHFUSE_DECLARE_LEVEL(level, enumerator, ...)                                       \
  namespace cpu::level {                                                                      \
  void apply_terms(const testing::TermInputs<float>& in, float* results);                     \
  void apply_terms(const testing::TermInputs<double>& in, double* results);                   \
  void load_bfloat16s(const BFloat16* from, std::int64_t count, float* to);                   \
  void load_bfloat16_pairs(const BFloat16* from, std::int64_t count, float* to);              \
  void load_halves(const Half* from, std::int64_t count, float* to);                          \
  void load_masters(const BFloat16* param, const std::int16_t* remainder, std::int64_t count, \
                    float* to);                                                               \
  void store_floats(const float* from, std::int64_t count, const testing::Stored& to);        \
  }
TORCHFUSE_FOR_EACH_LEVEL(TORCHFUSE_DECLARE_LEVEL)
#undef TORCHFUSE_DECLARE_LEVEL

}  // namespace torchfuse::kernels
