// SPDX-License-Identifier: BSD-3-Clause
// Stochastic rounding: the generator by its published values and by counting, the rounding for all
// 2^16 random numbers, and the driver at every level, for every split of the range.
#include "kernels/common/stochastic_rounding.h"

#include <gtest/gtest.h>

#include <array>
#include <functional>

#include "optimizer_cases.h"
#include "optimizer_problem.h"
#include "recorded_results.h"

namespace torchfuse::kernels::testing {
namespace {

// The known answers of Random123, the authors' own implementation, for philox2x32 with 7 rounds.
TEST(StochasticRounding, TheGeneratorIsPhilox) {
  const auto expect = [](PhiloxWords counter, std::uint32_t key, std::uint32_t first,
                         std::uint32_t second) {
    const PhiloxWords words = philox(counter, key);
    EXPECT_EQ(words.first, first);
    EXPECT_EQ(words.second, second);
  };
  expect({0, 0}, 0, 0x257a3673, 0xcd26be2a);
  expect({0xffffffff, 0xffffffff}, 0xffffffff, 0xab302c4d, 0x3dc9d239);
  expect({0x243f6a88, 0x85a308d3}, 0x13198a2e, 0xbedbbe6b, 0xe4c770b3);
}

/// Chi-square statistic of 2^20 numbers below 256 against the uniform distribution: 255 on average,
/// with a standard deviation of 22.6.
double chi_square(const std::function<std::uint32_t(std::uint64_t)>& number) {
  constexpr std::uint64_t kCount = 1 << 20;
  std::array<double, 256> counts{};
  for (std::uint64_t i = 0; i < kCount; ++i) counts.at(number(i)) += 1;
  constexpr double kExpected = kCount / 256.0;
  double sum = 0.0;
  for (const double count : counts) sum += (count - kExpected) * (count - kExpected) / kExpected;
  return sum;
}

void expect_uniform(const std::function<std::uint32_t(std::uint64_t)>& number) {
  const double statistic = chi_square(number);
  EXPECT_GT(statistic, 255 - 4.5 * 22.6);
  EXPECT_LT(statistic, 255 + 4.5 * 22.6);
}

TEST(StochasticRounding, RandomNumbersAreUniformInEveryDirection) {
  for (const std::uint64_t seed : {0ull, 1ull, 0x123456789abcdefull}) {
    SCOPED_TRACE(seed);
    const RoundingKey key = rounding_key(seed, 3, 17);
    expect_uniform([&](std::uint64_t i) { return random_16(key, i) >> 8; });
    expect_uniform([&](std::uint64_t i) { return random_16(key, i) & 0xffu; });
    expect_uniform([&](std::uint64_t i) { return random_16(rounding_key(seed, 3, i), 0) >> 8; });
    expect_uniform([&](std::uint64_t i) { return random_16(rounding_key(seed, i, 1), 5) >> 8; });
    expect_uniform([&](std::uint64_t i) { return random_16(rounding_key(i, 0, 1), seed) >> 8; });
  }
}

TEST(StochasticRounding, NeighborsAreIndependent) {
  const auto pair = [](std::uint32_t a, std::uint32_t b) { return (a >> 12) << 4 | b >> 12; };
  const RoundingKey key = rounding_key(1, 2, 3);
  const RoundingKey next_step = rounding_key(1, 2, 4);
  const RoundingKey next_param = rounding_key(1, 3, 3);
  const RoundingKey next_seed = rounding_key(2, 2, 3);
  expect_uniform([&](std::uint64_t i) { return pair(random_16(key, i), random_16(key, i + 1)); });
  expect_uniform(
      [&](std::uint64_t i) { return pair(random_16(key, i), random_16(key, i + (1ull << 32))); });
  for (const RoundingKey& other : {next_step, next_param, next_seed}) {
    expect_uniform([&](std::uint64_t i) { return pair(random_16(key, i), random_16(other, i)); });
  }
}

bool is_nan(std::uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

TEST(StochasticRounding, ValuesOfTheFormatStay) {
  for (std::uint32_t high = 0; high < 0x10000u; ++high) {
    const std::uint32_t expected = is_nan(high << 16) ? 0x7fc0 : high;
    for (const std::uint32_t random : {0u, 1u, 0x7fffu, 0x8000u, 0xffffu}) {
      ASSERT_EQ(round_stochastically(bits_to_float(high << 16), random).bits, expected);
    }
  }
}

TEST(StochasticRounding, TheChanceIsTheDistance) {
  for (const std::uint32_t high : {0x0000u, 0x0080u, 0x3f80u, 0xbf80u, 0x4049u, 0x7f7fu, 0xff7fu}) {
    for (const std::uint32_t low : {0x0001u, 0x00ffu, 0x8000u, 0xc000u, 0xffffu}) {
      const float value = bits_to_float(high << 16 | low);
      std::uint32_t up = 0;
      for (std::uint32_t random = 0; random < 0x10000u; ++random) {
        const std::uint32_t rounded = round_stochastically(value, random).bits;
        ASSERT_TRUE(rounded == high || rounded == high + 1);
        up += rounded - high;
      }
      ASSERT_EQ(up, low) << std::hex << high;
    }
  }
}

/// One bf16 parameter; with a master it keeps what stochastic rounding would round.
struct Problem {
  explicit Problem(std::int64_t numel, bool has_master = false)
      : tuple{DType::kBFloat16, DType::kBFloat16, DType::kFloat32, has_master, {}, false,
              !has_master},
        list(contents_of<Adam>(tuple, {numel})),
        update(tuple, list, {OptimizerCase<Adam>::group(11)}, &step) {
    const double inf = std::numeric_limits<double>::infinity();
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const double specials[] = {inf, -inf, nan, 0.0, -0.0, 3.3895e38, -3.3895e38, 1e-38, 1.0};
    Buffer& param = list[0].parts[kParam];
    for (std::int64_t i = 0; i < std::ssize(specials); ++i) param.set(i, specials[i]);
    for (std::int64_t i = 0; i < numel; ++i) list[0].parts[kMaster].set(i, param.get(i));
    update.types.seed = 42;
    row().index = 6;
  }

  TensorRow& row() { return update.rows.rows[0]; }
  std::int64_t numel() const { return list[0].parts[kParam].numel(); }
  void run(CpuIsa isa = detect_cpu_isa(), std::int64_t span = kWhole) {
    update.run_on_cpu({0.5, 0.0f, 0.0f}, isa, span);
  }

  /// Element i must be what the master of `exact` is rounded to by random number number_of(i).
  template <class NumberOf>
  void expect_rounded(const Problem& exact, const NumberOf& number_of) const {
    const RoundingKey key = rounding_key(42, 6, 5);
    const auto* bits = static_cast<const BFloat16*>(list[0].parts[kParam].data());
    for (std::int64_t i = 0; i < numel(); ++i) {
      const float value = static_cast<float>(exact.list[0].parts[kMaster].get(i));
      const std::uint32_t random = random_16(key, static_cast<std::uint64_t>(number_of(i)));
      ASSERT_EQ(bits[i].bits, round_stochastically(value, random).bits) << i;
    }
    ASSERT_TRUE(list[0].parts[kFirst] == exact.list[0].parts[kFirst]);
  }

  UpdateTuple tuple;
  float step = 5.0f;
  TensorList list;
  OptimizerProblem<Adam> update;
};

TEST(StochasticRounding, TheDriverRoundsWhatAMasterWouldKeep) {
  Problem exact(5003, true);
  exact.run(CpuIsa::kBaseline);
  for (const CpuIsa isa : levels_here()) {
    SCOPED_TRACE(name_of(isa));
    for (const std::int64_t span : {kWhole, std::int64_t{1}, std::int64_t{331}}) {
      Problem problem(5003);
      problem.run(isa, span);
      problem.expect_rounded(exact, [](std::int64_t i) { return i; });
      if (isa == CpuIsa::kBaseline && span == kWhole) record(problem.list[0].parts);
    }
  }
}

TEST(StochasticRounding, ElementsAreCountedIn64Bits) {
  constexpr std::int64_t kStart = (std::int64_t{1} << 32) - 41;
  Problem exact(83, true);
  exact.run(CpuIsa::kBaseline);
  for (const CpuIsa isa : levels_here()) {
    SCOPED_TRACE(name_of(isa));
    // The last elements of a tensor, of which nothing else exists.
    Problem problem(83);
    for (const Part part : {kParam, kGrad, kFirst, kSecond, kMaximum}) {
      void*& operand = pointer_of(problem.row(), part);
      operand = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(operand) -
                                        static_cast<std::uintptr_t>(kStart) *
                                            size_of(problem.tuple.dtype(part)));
    }
    problem.row().numel = kStart + 83;
    problem.update.rows.offsets.back() = kStart + 83;
    const StepScalars scalars{0.5, 0.0f, 0.0f};
    fused_update_cpu(isa, problem.update.update(&scalars), kStart, kStart + 83);
    problem.expect_rounded(exact, [](std::int64_t i) { return kStart + i; });
  }
}

TEST(StochasticRounding, ElementsOfAPartHaveTheirNumbersInTheWhole) {
  Problem exact(1003, true);
  exact.run(CpuIsa::kBaseline);
  constexpr std::int64_t kFar = (std::int64_t{1} << 32) - 500;
  for (const CpuIsa isa : levels_here()) {
    for (const ElementNumbers numbers :
         {ElementNumbers{77, 0, 0}, {0, 1, 4}, {30, 5, 9}, {kFar, 47, 100}, {3, 64, 64}}) {
      for (const std::int64_t span : {kWhole, std::int64_t{1}, std::int64_t{331}}) {
        SCOPED_TRACE(std::string(name_of(isa)) + ", runs of " + std::to_string(numbers.run));
        Problem problem(1003);
        problem.row().numbers = numbers;
        problem.run(isa, span);
        problem.expect_rounded(exact, [&](std::int64_t i) {
          const std::int64_t run = numbers.run == 0 ? 1003 : numbers.run;
          return numbers.first + i / run * numbers.stride + i % run;
        });
      }
    }
  }
}

TEST(StochasticRounding, ElementsOfAChunkHaveTheNumbersOfThePart) {
  constexpr std::int64_t kFar = (std::int64_t{1} << 32) - 3;
  for (const ElementNumbers numbers : {ElementNumbers{77, 0, 0},
                                       {0, 1, 4},
                                       {30, 5, 9},
                                       {kFar, 47, 100},
                                       {3, 64, 64},
                                       {5, kFar + 2, 3 * kFar},
                                       {5, kFar + 4, 3 * kFar},
                                       {0, 10 * kFar, 20 * kFar}}) {
    for (const std::int64_t begin :
         {std::int64_t{0}, std::int64_t{46}, std::int64_t{640}, kFar - 40, 10 * kFar - 40}) {
      const ChunkNumbers chunk = ChunkNumbers::of(numbers, begin);
      for (const std::uint32_t element : {0u, 1u, 7u, 38u, 45u, 46u, 47u, 999u}) {
        NumberWalk walk(chunk, element);
        for (std::int64_t i = begin + element; i < begin + element + 150; ++i) {
          const std::int64_t number =
              numbers.run == 0 ? numbers.first + i
                               : numbers.first + i / numbers.run * numbers.stride + i % numbers.run;
          ASSERT_EQ(walk.next(), static_cast<std::uint64_t>(number)) << numbers.run << " " << i;
        }
      }
    }
  }
}

TEST(StochasticRounding, SeedParameterAndStepEachChangeTheBits) {
  Problem usual(2000);
  usual.run();
  const auto differs = [&](const std::function<void(Problem&)>& change) {
    Problem other(2000);
    change(other);
    other.run();
    return !(other.list[0].parts[kParam] == usual.list[0].parts[kParam]);
  };
  EXPECT_FALSE(differs([](Problem&) {}));
  EXPECT_TRUE(differs([](Problem& problem) { problem.update.types.seed = 43; }));
  EXPECT_TRUE(differs([](Problem& problem) { problem.row().index = 7; }));
  EXPECT_TRUE(differs([](Problem& problem) { problem.step = 6.0f; }));
}

}  // namespace
}  // namespace torchfuse::kernels::testing
