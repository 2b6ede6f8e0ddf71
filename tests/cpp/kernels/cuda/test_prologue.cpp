// SPDX-License-Identifier: BSD-3-Clause
// The prologue as a kernel of its own, against the CPU's. Behind the norm: test_last_block.cpp.
#include "kernels/prologue.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>

#include "prologue_step.h"

namespace torchfuse::kernels {
namespace {

using namespace testing;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const double kNan = std::nan("");

void expect_the_cpus_bits(const Step& step) {
  expect_same_outcome(prologue_on_device(step), prologue_on_cpu(step));
}

TEST(CudaPrologue, EveryChoiceHasTheCpusBits) {
  set_order({});
  Step step;
  step.counts = {0.0f, 7.0f, 100.0f};
  for (const NormPartial& partial : std::vector<NormPartial>{{0.0, 0.0, 0},
                                                             {25.0, 0.0, 0},
                                                             {2.0, 0.0, 1},
                                                             {kInfinity, 0.0, 1},
                                                             {kNan, 0.0, 1},
                                                             {1e300, 0x1p-190, 0},
                                                             {0.0, 1.0, 0}}) {
    step.partials = {partial};
    for (const double max_norm : {-1.0, 0.0, 0.5, 1e9, kInfinity, kNan}) {
      step.max_grad_norm = max_norm;
      for (const std::optional<float> scale : std::vector<std::optional<float>>{
               std::nullopt, 1.0f, 65536.0f, 3.0f, 0.0f, 0x1p127f, 0x1p-127f,
               std::numeric_limits<float>::infinity(), NAN}) {
        step.grad_scale = scale;
        for (const bool has_norm : {false, true}) {
          step.has_norm = has_norm;
          expect_the_cpus_bits(step);
          ASSERT_FALSE(::testing::Test::HasFailure())
              << "sums " << partial.small << ' ' << partial.big << ", clipped to " << max_norm
              << ", scale " << scale.value_or(-1.0f) << ", has_norm " << has_norm;
        }
      }
    }
  }
}

TEST(CudaPrologue, SmallStepsAreSkippedForAnyFlagThatIsNotZero) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const std::optional<float> flag : std::vector<std::optional<float>>{
           std::nullopt, 0.0f, -0.0f, 1.0f, 2.0f, -1.0f, infinity, NAN}) {
    for (const bool check : {false, true}) {
      // Then the flag is written, whatever it was.
      for (const bool output : {false, true}) {
        if (output && !(check && flag)) continue;
        for (const std::uint64_t nonfinite : {0, 1}) {
          Step step{.found_inf = flag, .found_inf_is_output = output, .check = check};
          step.counts.assign(300, 5.0f);
          step.partials = {{1.0, 0.0, 0}, {1.0, 0.0, nonfinite}};
          set_order({.seed = 3 + nonfinite});
          const Outcome outcome = prologue_on_device(step);
          expect_same_outcome(outcome, prologue_on_cpu(step));
          const bool found = check && nonfinite != 0;
          const bool skipped = found || (!output && flag && *flag != 0.0f);
          EXPECT_EQ(outcome.scalars.skip, skipped ? 1.0f : 0.0f) << flag.value_or(-9.0f);
          EXPECT_EQ(outcome.counts, std::vector<float>(300, skipped ? 5.0f : 6.0f));
          if (output) {
            EXPECT_EQ(outcome.found_inf, found ? 1.0f : 0.0f) << *flag;
          }
        }
      }
    }
  }
}

/// Partials whose sums need no rounding.
std::vector<NormPartial> whole_partials(std::size_t count, std::mt19937& random) {
  std::vector<NormPartial> partials(count);
  for (NormPartial& partial : partials) {
    partial = {static_cast<double>(random() % 100000 + 1), 0.0, 0};
  }
  return partials;
}

const std::size_t kCounts[] = {0,   1,   2,   31,  32,   33,   255,  256,
                               257, 511, 512, 513, 1023, 1024, 1025, 20000};

TEST(CudaPrologue, SumsOfAnyNumberOfPartialsAreComplete) {
  std::mt19937 random(1);
  for (const std::size_t count : kCounts) {
    Step step;
    step.partials = whole_partials(count, random);
    set_order({.seed = count});
    expect_the_cpus_bits(step);
    // In the second accumulator as well.
    for (NormPartial& partial : step.partials) partial.big = partial.small * 0x1p-20;
    expect_the_cpus_bits(step);
    ASSERT_FALSE(HasFailure()) << count << " partials";
  }
}

TEST(CudaPrologue, AnyPartialsFlagIsSeen) {
  std::mt19937 random(2);
  Step step;
  step.check = true;
  step.found_inf = 0.0f;
  step.partials = whole_partials(1025, random);
  for (const std::size_t at : {0, 1, 31, 32, 255, 256, 257, 767, 768, 1023, 1024}) {
    step.partials[at].nonfinite = 1;
    set_order({.seed = at});
    const Outcome outcome = prologue_on_device(step);
    step.partials[at].nonfinite = 0;
    EXPECT_EQ(outcome.scalars.skip, 1.0f) << at;
    EXPECT_EQ(outcome.found_inf, 1.0f) << at;
  }
}

TEST(CudaPrologue, StepsOfAnyNumberGrowOnce) {
  std::mt19937 random(3);
  // 4,000 fit into a launch, or 4,096 in a row, and then any number in a row.
  for (const bool scattered : {false, true}) {
    for (const std::size_t count :
         {0, 1, 255, 256, 257, 3999, 4000, 4001, 4096, 4097, 8000, 8001, 9000}) {
      Step step;
      step.scattered = scattered;
      step.partials = {{1.0, 0.0, 0}};
      step.counts.resize(count);
      std::iota(step.counts.begin(), step.counts.end(), 0.0f);
      set_order({.seed = count, .resident_blocks = 4});
      expect_the_cpus_bits(step);
      step.found_inf = 1.0f;
      expect_the_cpus_bits(step);
      ASSERT_FALSE(::testing::Test::HasFailure()) << count << " steps";
    }
  }
}

NormPartial reduced_on_device(const std::vector<NormPartial>& partials) {
  const DeviceArray<NormPartial> source(partials);
  const auto sum = DeviceArray<NormPartial>::unwritten(1);
  expect_ok(reduce_partials_cuda(source.data(), static_cast<std::int64_t>(partials.size()),
                                 sum.data(), stream()));
  source.expect_accesses(1, 0);
  sum.expect_accesses(0, 1);
  sum.expect_margins_intact();
  return sum.to_host()[0];
}

NormPartial reduced_on_cpu(const std::vector<NormPartial>& partials) {
  NormPartial sum{};
  reduce_partials_cpu(partials.data(), static_cast<std::int64_t>(partials.size()), &sum);
  return sum;
}

// The device adds in another order than the CPU: the bits are the same only where nothing is
// rounded. Both orders round each number at most `count` times.
TEST(CudaReducePartials, SumsDifferFromTheCpusByRoundingAloneInAnyOrderOfExecution) {
  std::mt19937 random(4);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (const std::size_t count : kCounts) {
    std::vector<NormPartial> partials(count);
    for (NormPartial& partial : partials) partial = {uniform(random), uniform(random), 0};
    set_order({.seed = count});
    const NormPartial sum = reduced_on_device(partials);
    const NormPartial expected = reduced_on_cpu(partials);
    const double bound = 2.0 * 0x1p-53 * static_cast<double>(count);
    EXPECT_NEAR(sum.small, expected.small, bound * expected.small) << count;
    EXPECT_NEAR(sum.big, expected.big, bound * expected.big) << count;
    EXPECT_EQ(sum.nonfinite, 0u) << count;
    for (const std::uint64_t seed : {0, 1}) {
      set_order({.seed = seed});
      const NormPartial again = reduced_on_device(partials);
      EXPECT_EQ(std::memcmp(&again, &sum, sizeof sum), 0) << count;
    }
  }
}

TEST(CudaReducePartials, SmallSumsOfWholeNumbersHaveTheCpusBitsInAnyOrderOfExecution) {
  std::mt19937 random(5);
  auto partials = whole_partials(700, random);
  for (const std::size_t nonfinite : {0, 1}) {
    partials[699].nonfinite = nonfinite;
    for (const std::uint64_t seed : {0, 1, 2}) {
      set_order({.seed = seed});
      const NormPartial sum = reduced_on_device(partials);
      const NormPartial expected = reduced_on_cpu(partials);
      EXPECT_EQ(sum.small, expected.small);
      EXPECT_EQ(sum.big, expected.big);
      EXPECT_EQ(sum.nonfinite, nonfinite);
    }
  }
}

}  // namespace
}  // namespace torchfuse::kernels
