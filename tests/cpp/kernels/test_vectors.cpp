// SPDX-License-Identifier: BSD-3-Clause
// Each term of vectors gives the bits of the baseline's scalar one, for every kind of number.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "kernel_test.h"
#include "kernels/common/param_remainder.h"
#include "kernels/cpu/flush_denormals.h"
#include "recorded_results.h"
#include "vector_terms.h"

namespace torchfuse::kernels::testing {
namespace {

constexpr std::int64_t kEncodings = 65536;

/// Calls function(arguments) of the level `isa`.
#define TORCHFUSE_CALL_LEVEL(level, enumerator, function, ...) \
  case CpuIsa::enumerator:                                     \
    return cpu::level::function(__VA_ARGS__);
template <class T>
void apply_terms(CpuIsa isa, const TermInputs<T>& in, T* results) {
  switch (entered(isa)) { TORCHFUSE_FOR_EACH_LEVEL(TORCHFUSE_CALL_LEVEL, apply_terms, in, results) }
}
void load_bfloat16s(CpuIsa isa, const BFloat16* from, float* to) {
  switch (entered(isa)) {
    TORCHFUSE_FOR_EACH_LEVEL(TORCHFUSE_CALL_LEVEL, load_bfloat16s, from, kEncodings, to)
  }
}
void load_bfloat16_pairs(CpuIsa isa, const BFloat16* from, float* to) {
  switch (entered(isa)) {
    TORCHFUSE_FOR_EACH_LEVEL(TORCHFUSE_CALL_LEVEL, load_bfloat16_pairs, from, kEncodings, to)
  }
}
void load_halves(CpuIsa isa, const Half* from, float* to) {
  switch (entered(isa)) {
    TORCHFUSE_FOR_EACH_LEVEL(TORCHFUSE_CALL_LEVEL, load_halves, from, kEncodings, to)
  }
}
void load_masters(CpuIsa isa, const BFloat16* param, const std::int16_t* remainder, float* to) {
  switch (entered(isa)) {
    TORCHFUSE_FOR_EACH_LEVEL(TORCHFUSE_CALL_LEVEL, load_masters, param, remainder, kEncodings, to)
  }
}
void store_floats(CpuIsa isa, const std::vector<float>& from, const Stored& to) {
  const auto count = static_cast<std::int64_t>(from.size());
  switch (entered(isa)) {
    TORCHFUSE_FOR_EACH_LEVEL(TORCHFUSE_CALL_LEVEL, store_floats, from.data(), count, to)
  }
}
#undef TORCHFUSE_CALL_LEVEL

/// Zeros, denormals, the ends of the range, ties, infinities, NaN; both signs.
template <class T>
std::vector<T> kinds_of_numbers() {
  using Limits = std::numeric_limits<T>;
  std::vector<T> all;
  for (const T x : {T(0),
                    Limits::denorm_min(),
                    Limits::min() / 2,
                    std::nextafter(Limits::min(), T(0)),
                    Limits::min(),
                    std::nextafter(Limits::min(), T(1)),
                    T(1) / 3,
                    T(1) - Limits::epsilon() / 2,
                    T(1),
                    T(1) + Limits::epsilon(),
                    T(1.5),
                    T(0x1p58),
                    T(0x1.fffffep57),
                    T(0x1p-63),
                    T(65519),
                    T(65520),
                    Limits::max() / 2,
                    Limits::max(),
                    Limits::infinity(),
                    Limits::quiet_NaN()}) {
    all.push_back(x);
    all.push_back(-x);
  }
  return all;
}

template <class T>
T any_bits(std::mt19937_64& random) {
  const std::uint64_t bits = random();
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
bool same(T x, T y) {
  return std::memcmp(&x, &y, sizeof x) == 0 || (std::isnan(x) && std::isnan(y));
}

/// All pairs of kinds of numbers with a third number, then random bits.
template <class T>
struct Numbers {
  std::vector<T> a, b, c;

  Numbers() {
    std::mt19937_64 random(1);
    const std::vector<T> kinds = kinds_of_numbers<T>();
    for (const T x : kinds) {
      for (const T y : kinds) {
        for (int repeat = 0; repeat < 8; ++repeat) add(x, y, kinds[random() % kinds.size()]);
      }
    }
    while (a.size() % 64 != 0 || a.size() < 100000) {
      // One after the other: compilers evaluate arguments in different orders.
      const T x = any_bits<T>(random);
      const T y = any_bits<T>(random);
      add(x, y, any_bits<T>(random));
    }
  }

  void add(T x, T y, T z) {
    a.push_back(x);
    b.push_back(y);
    c.push_back(z);
  }

  std::vector<T> results(CpuIsa isa) const {
    std::vector<T> results(a.size() * std::size(kTerms));
    const TermInputs<T> in{a.data(), b.data(), c.data(), static_cast<std::int64_t>(a.size())};
    std::optional<cpu::FlushDenormals> flush;
    if (sizeof(T) < sizeof(double)) flush.emplace();
    apply_terms(isa, in, results.data());
    return results;
  }

  void expect_same_bits_at_every_level() const {
    const std::vector<T> expected = results(CpuIsa::kBaseline);
    for (auto term = expected.begin(); term != expected.end();) {
      const auto next = term + static_cast<std::ptrdiff_t>(a.size());
      record(std::vector<T>(term, next));
      term = next;
    }
    for (const CpuIsa isa : levels_here()) {
      const std::vector<T> got = results(isa);
      for (std::size_t i = 0; i < expected.size(); ++i) {
        const std::size_t k = i % a.size();
        ASSERT_TRUE(same(got[i], expected[i]))
            << kernels::name_of(isa) << ": " << kTerms[i / a.size()]
            << " with a, b, c = " << std::hexfloat << a[k] << ", " << b[k] << ", " << c[k] << ": "
            << got[i] << " instead of " << expected[i];
      }
    }
  }
};

TEST(Vectors, OfFloatsComputeAsTheBaselineWhereDenormalsAreFlushed) {
  Numbers<float>().expect_same_bits_at_every_level();
}

TEST(Vectors, OfDoublesComputeAsTheBaseline) {
  Numbers<double>().expect_same_bits_at_every_level();
}

/// The larger of two numbers by its definition: NaN if either is, the second of two zeros.
TEST(Vectors, TakeTheLargerNumberByItsDefinition) {
  const Numbers<double> numbers;
  for (const CpuIsa isa : levels_here()) {
    const std::vector<double> results = numbers.results(isa);
    for (std::size_t i = 0; i < numbers.a.size(); ++i) {
      const double a = numbers.a[i];
      const double b = numbers.b[i];
      const double expected = std::isnan(a) || a > b ? a : b;
      ASSERT_TRUE(same(results[6 * numbers.a.size() + i], expected))
          << kernels::name_of(isa) << ": " << kTerms[6] << " with a = " << a << ", b = " << b;
    }
  }
}

TEST(Vectors, ReadEveryEncoding) {
  std::vector<BFloat16> bfloat16s;
  std::vector<Half> halves;
  std::vector<std::int16_t> remainders;
  for (std::uint32_t bits = 0; bits < kEncodings; ++bits) {
    bfloat16s.push_back({static_cast<std::uint16_t>(bits)});
    halves.push_back({static_cast<std::uint16_t>(bits)});
    remainders.push_back(static_cast<std::int16_t>(bits * 40503));
  }
  for (const CpuIsa isa : levels_here()) {
    SCOPED_TRACE(kernels::name_of(isa));
    std::vector<float> wide(kEncodings), paired(kEncodings), from_half(kEncodings),
        master(kEncodings);
    {
      const cpu::FlushDenormals flush;
      load_bfloat16s(isa, bfloat16s.data(), wide.data());
      load_bfloat16_pairs(isa, bfloat16s.data(), paired.data());
      load_halves(isa, halves.data(), from_half.data());
      load_masters(isa, bfloat16s.data(), remainders.data(), master.data());
    }
    for (std::size_t i = 0; i < kEncodings; ++i) {
      ASSERT_TRUE(same(wide[i], to_float(bfloat16s[i]))) << i;
      ASSERT_TRUE(same(paired[i], wide[i])) << i;
      ASSERT_TRUE(same(from_half[i], to_float(halves[i]))) << i;
      const auto remainder = static_cast<std::uint16_t>(remainders[i]);
      ASSERT_TRUE(same(master[i], bits_to_float(join_master({bfloat16s[i].bits, remainder})))) << i;
    }
  }
}

TEST(Vectors, StoreFloatsIn16Bits) {
  // Results are no denormals, which kernels flush.
  std::vector<float> floats;
  for (const float x : kinds_of_numbers<float>()) {
    if (std::fpclassify(x) != FP_SUBNORMAL) floats.push_back(x);
  }
  for (std::uint32_t bits = 0; bits < 0x8000; ++bits) {
    // On, and next to, what lies between two numbers of either format.
    for (const std::uint32_t tie : {0x8000u, 0x1000u}) {
      for (const std::uint32_t next : {tie - 1, tie, tie + 1}) {
        const float x = bits_to_float((bits << 16) | next);
        if (std::fpclassify(x) != FP_SUBNORMAL) floats.push_back(bits % 2 == 0 ? x : -x);
      }
    }
  }
  floats.resize(floats.size() / 64 * 64);
  const std::size_t count = floats.size();
  for (const CpuIsa isa : levels_here()) {
    SCOPED_TRACE(kernels::name_of(isa));
    std::vector<BFloat16> nearest(count), paired(count), stochastic(count), param(count);
    std::vector<Half> half(count);
    std::vector<std::int16_t> remainder(count);
    {
      const cpu::FlushDenormals flush;
      store_floats(isa, floats,
                   {nearest.data(), paired.data(), stochastic.data(), half.data(), param.data(),
                    remainder.data()});
    }
    for (std::size_t i = 0; i < count; ++i) {
      const float x = floats[i];
      const std::uint32_t random = random_16(kStoredKey, kStoredElement + i);
      const SplitMaster halves = split_master(float_bits(x));
      ASSERT_TRUE(same(to_float(nearest[i]), to_float(to_bfloat16(x)))) << x;
      ASSERT_TRUE(same(to_float(paired[i]), to_float(nearest[i]))) << x;
      ASSERT_EQ(stochastic[i].bits, round_stochastically(x, random).bits) << x << ", " << i;
      ASSERT_TRUE(same(to_float(half[i]), to_float(to_half(x)))) << x;
      ASSERT_EQ(param[i].bits, halves.param) << x;
      ASSERT_EQ(static_cast<std::uint16_t>(remainder[i]), halves.remainder) << x;
    }
  }
}

}  // namespace
}  // namespace torchfuse::kernels::testing
