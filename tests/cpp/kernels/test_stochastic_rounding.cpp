// SPDX-License-Identifier: BSD-3-Clause
// Stochastic rounding: the generator by its published values and by counting, the rounding for all
// 2^16 random numbers, and the driver at every level, for every split of the range.
#include "kernels/common/stochastic_rounding.h"

#include <gtest/gtest.h>

#include <array>
#include <functional>

#include "kernel_test.h"
#include "kernels/functors/adam.h"
#include "kernels/fused_optimizer.h"
#include "recorded_results.h"

namespace torchfuse::kernels {
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
  Problem(std::int64_t numel, bool has_master) : numel(numel), has_master(has_master) {
    std::mt19937 random(11);
    for (Buffer* buffer : {&param, &grad, &first, &second, &third, &master}) {
      *buffer = Buffer(buffer->dtype(), numel);
    }
    grad.fill_normal(random);
    param.fill_normal(random);
    first.fill_normal(random, 0.1);
    second.fill_abs_normal(random, 0.01);
    const double inf = std::numeric_limits<double>::infinity();
    const double specials[] = {inf,        -inf,  std::numeric_limits<double>::quiet_NaN(),
                               0.0,        -0.0,  3.3895e38,
                               -3.3895e38, 1e-38, 1.0};
    std::int64_t i = 0;
    for (const double special : specials) {
      if (i < numel) param.set(i++, special);
    }
    for (i = 0; i < numel; ++i) master.set(i, param.get(i));
  }

  /// Updates elements [begin, end) of a tensor of which these are the ones from `start` on.
  void update(CpuIsa isa, std::int64_t begin, std::int64_t end, std::int64_t start = 0) {
    const auto shifted = [start](Buffer& buffer) {
      const auto address = reinterpret_cast<std::uintptr_t>(buffer.data());
      return reinterpret_cast<void*>(address -
                                     static_cast<std::uintptr_t>(start) * size_of(buffer.dtype()));
    };
    AdamParams group;
    group.lr.value = 1e-3;
    group.beta1.value = 0.9;
    group.beta2.value = 0.999;
    group.eps.value = 1e-8;
    group.amsgrad = true;
    TensorRow row;
    row.param = shifted(param);
    row.grad = shifted(grad);
    row.state[0] = shifted(first);
    row.state[1] = shifted(second);
    row.state[2] = shifted(third);
    row.master = has_master ? shifted(master) : nullptr;
    row.step = &step;
    row.numel = start + numel;
    row.index = index;
    row.numbers = numbers;
    testing::Rows rows;
    rows.add(row);
    UpdateArgs<Adam> args;
    args.tensors = rows.table(DType::kBFloat16, DType::kBFloat16, DType::kFloat32, has_master);
    args.tensors.stochastic = !has_master;
    args.tensors.seed = seed;
    args.groups = &group;
    args.num_groups = 1;
    args.scalars = &scalars;
    fused_update_cpu(isa, args, begin, end);
  }

  std::uint32_t bits(std::int64_t i) const {
    return static_cast<const BFloat16*>(param.data())[i].bits;
  }

  using Buffer = testing::Buffer;
  std::int64_t numel;
  bool has_master;
  std::uint64_t seed = 42;
  std::int64_t index = 6;
  ElementNumbers numbers{};
  float step = 5.0f;
  StepScalars scalars{0.5, 0.0f, 0.0f};
  Buffer param{DType::kBFloat16, 0}, grad{DType::kBFloat16, 0}, first{DType::kFloat32, 0},
      second{DType::kFloat32, 0}, third{DType::kFloat32, 0}, master{DType::kFloat32, 0};
};

TEST(StochasticRounding, TheDriverRoundsWhatAMasterWouldKeep) {
  constexpr std::int64_t kNumel = 5003;
  Problem exact(kNumel, true);
  exact.update(CpuIsa::kBaseline, 0, kNumel);
  const RoundingKey key = rounding_key(42, 6, 5);
  for (const CpuIsa isa : testing::levels_here()) {
    SCOPED_TRACE(name_of(isa));
    for (const std::int64_t split : {kNumel, std::int64_t{1}, std::int64_t{331}}) {
      Problem problem(kNumel, false);
      for (std::int64_t begin = 0; begin < kNumel; begin += split) {
        problem.update(isa, begin, std::min(kNumel, begin + split));
      }
      if (isa == CpuIsa::kBaseline && split == kNumel) {
        testing::record(problem.param, problem.first, problem.second);
      }
      for (std::int64_t i = 0; i < kNumel; ++i) {
        const float value = static_cast<float>(exact.master.get(i));
        const std::uint32_t random = random_16(key, static_cast<std::uint64_t>(i));
        ASSERT_EQ(problem.bits(i), round_stochastically(value, random).bits) << i;
      }
      ASSERT_TRUE(problem.first == exact.first);
    }
  }
}

TEST(StochasticRounding, ElementsAreCountedIn64Bits) {
  constexpr std::int64_t kNumel = 83;
  constexpr std::int64_t kStart = (std::int64_t{1} << 32) - 41;
  Problem exact(kNumel, true);
  exact.update(CpuIsa::kBaseline, 0, kNumel);
  const RoundingKey key = rounding_key(42, 6, 5);
  for (const CpuIsa isa : testing::levels_here()) {
    SCOPED_TRACE(name_of(isa));
    Problem problem(kNumel, false);
    problem.update(isa, kStart, kStart + kNumel, kStart);
    for (std::int64_t i = 0; i < kNumel; ++i) {
      const float value = static_cast<float>(exact.master.get(i));
      const std::uint32_t random = random_16(key, static_cast<std::uint64_t>(kStart + i));
      ASSERT_EQ(problem.bits(i), round_stochastically(value, random).bits) << i;
    }
  }
}

TEST(StochasticRounding, ElementsOfAPartHaveTheirNumbersInTheWhole) {
  constexpr std::int64_t kNumel = 1003;
  Problem exact(kNumel, true);
  exact.update(CpuIsa::kBaseline, 0, kNumel);
  const RoundingKey key = rounding_key(42, 6, 5);
  constexpr std::int64_t kFar = (std::int64_t{1} << 32) - 500;
  for (const CpuIsa isa : testing::levels_here()) {
    for (const ElementNumbers numbers :
         {ElementNumbers{77, 0, 0}, {0, 1, 4}, {30, 5, 9}, {kFar, 47, 100}, {3, 64, 64}}) {
      for (const std::int64_t split : {kNumel, std::int64_t{1}, std::int64_t{331}}) {
        SCOPED_TRACE(std::string(name_of(isa)) + ", runs of " + std::to_string(numbers.run));
        Problem problem(kNumel, false);
        problem.numbers = numbers;
        for (std::int64_t begin = 0; begin < kNumel; begin += split) {
          problem.update(isa, begin, std::min(kNumel, begin + split));
        }
        for (std::int64_t i = 0; i < kNumel; ++i) {
          const std::int64_t run = numbers.run == 0 ? kNumel : numbers.run;
          const std::int64_t number = numbers.first + i / run * numbers.stride + i % run;
          const float value = static_cast<float>(exact.master.get(i));
          const std::uint32_t random = random_16(key, static_cast<std::uint64_t>(number));
          ASSERT_EQ(problem.bits(i), round_stochastically(value, random).bits) << i;
        }
        ASSERT_TRUE(problem.first == exact.first);
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
  constexpr std::int64_t kNumel = 2000;
  Problem usual(kNumel, false);
  usual.update(detect_cpu_isa(), 0, kNumel);
  const auto differs = [&](const std::function<void(Problem&)>& change) {
    Problem other(kNumel, false);
    change(other);
    other.update(detect_cpu_isa(), 0, kNumel);
    return !(other.param == usual.param);
  };
  EXPECT_FALSE(differs([](Problem&) {}));
  EXPECT_TRUE(differs([](Problem& problem) { problem.seed = 43; }));
  EXPECT_TRUE(differs([](Problem& problem) { problem.index = 7; }));
  EXPECT_TRUE(differs([](Problem& problem) { problem.step = 6.0f; }));
}

}  // namespace
}  // namespace torchfuse::kernels
