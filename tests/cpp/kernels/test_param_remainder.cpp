// SPDX-License-Identifier: BSD-3-Clause
// Masters as bf16 parameters and remainders: every bf16 with remainders all over, by themselves and
// through the update driver, which must give the masters of a run with fp32 masters.
#include "kernels/common/param_remainder.h"

#include <gtest/gtest.h>

#include <limits>

#include "kernel_test.h"
#include "kernels/functors/adam.h"
#include "kernels/fused_optimizer.h"

namespace torchfuse::kernels {
namespace {

constexpr std::uint32_t kLows[] = {0x0000, 0x0001, 0x0002, 0x1234, 0x7ffe, 0x7fff,
                                   0x8000, 0x8001, 0x8002, 0xabcd, 0xfffe, 0xffff};

bool is_nan(std::uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

/// Every upper half with each of kLows below it.
std::vector<std::uint32_t> masters() {
  std::vector<std::uint32_t> all;
  for (std::uint32_t high = 0; high < 0x10000u; ++high) {
    for (const std::uint32_t low : kLows) all.push_back(high << 16 | low);
  }
  return all;
}

TEST(ParamRemainder, EveryMasterIsRestored) {
  for (const std::uint32_t bits : masters()) {
    const SplitMaster halves = split_master(bits);
    ASSERT_EQ(join_master(halves), is_nan(bits) ? 0x7fc00000u : bits) << std::hex << bits;
  }
}

TEST(ParamRemainder, TheMasterIsTheSumOfBothHalvesAsSignedNumbers) {
  for (const std::uint32_t bits : masters()) {
    const SplitMaster halves = split_master(bits);
    const auto remainder = static_cast<std::int16_t>(halves.remainder);
    const std::uint32_t sum = (static_cast<std::uint32_t>(halves.param) << 16) +
                              static_cast<std::uint32_t>(static_cast<std::int32_t>(remainder));
    ASSERT_EQ(join_master(halves), sum) << std::hex << bits;
  }
}

TEST(ParamRemainder, TheParameterIsTheNearestAndAwayFromZeroOfTwo) {
  for (const std::uint32_t bits : masters()) {
    const std::uint32_t param = split_master(bits).param;
    const std::uint32_t even = to_bfloat16(bits_to_float(bits)).bits;
    const bool halfway = !is_nan(bits) && (bits & 0xffffu) == 0x8000u;
    ASSERT_EQ(param, halfway ? (bits >> 16) + 1 : even) << std::hex << bits;
  }
}

/// What joining means, in words of numbers: the sum, unless no master has these halves.
std::uint32_t joined(std::uint32_t param, std::int32_t remainder) {
  const std::uint32_t magnitude = param & 0x7fffu;
  const bool stale = (magnitude == 0 && remainder < 0) || (magnitude == 0x7f80u && remainder > 0);
  return (param << 16) + static_cast<std::uint32_t>(stale ? 0 : remainder);
}

TEST(ParamRemainder, NoRemainderMakesAParameterNanOrInfinite) {
  for (std::uint32_t param = 0; param < 0x10000u; ++param) {
    for (const std::uint32_t low : kLows) {
      const auto halves =
          SplitMaster{static_cast<std::uint16_t>(param), static_cast<std::uint16_t>(low)};
      const std::uint32_t master = join_master(halves);
      if (is_nan(param << 16)) {
        ASSERT_TRUE(is_nan(master)) << std::hex << param << ' ' << low;
        continue;
      }
      ASSERT_EQ(master, joined(param, static_cast<std::int16_t>(low)))
          << std::hex << param << ' ' << low;
      ASSERT_EQ(master & 0x80000000u, (param << 16) & 0x80000000u) << std::hex << param;
      const bool finite = (param & 0x7fffu) < 0x7f80u;
      ASSERT_FALSE(finite && !std::isfinite(bits_to_float(master))) << std::hex << param;
    }
  }
}

/// One tensor, its masters in fp32 or as remainders.
struct Problem {
  Problem(const std::vector<std::uint32_t>& start, bool remainders)
      : numel(static_cast<std::int64_t>(start.size())),
        grads(start.size()),
        first(start.size()),
        second(start.size()),
        third(start.size()),
        params(start.size()),
        lows(start.size()),
        masters(start),
        remainders(remainders) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < start.size(); ++i) {
      grads[i] = normal(random);
      const SplitMaster halves = split_master(start[i]);
      params[i] = halves.param;
      lows[i] = static_cast<std::int16_t>(halves.remainder);
    }
  }

  void update(CpuIsa isa, const AdamParams& group, std::int64_t split) {
    TensorRow row;
    row.param = params.data();
    row.grad = grads.data();
    row.state[0] = first.data();
    row.state[1] = second.data();
    row.state[2] = third.data();
    row.master = remainders ? static_cast<void*>(lows.data()) : masters.data();
    row.step = &step;
    row.numel = numel;
    testing::Rows rows;
    rows.add(row);
    UpdateArgs<Adam> args;
    args.tensors = rows.table(DType::kBFloat16, DType::kFloat32, DType::kFloat32, !remainders);
    args.tensors.has_remainder = remainders;
    args.groups = &group;
    args.num_groups = 1;
    args.scalars = &scalars;
    for (std::int64_t begin = 0; begin < numel; begin += split) {
      fused_update_cpu(isa, args, begin, std::min(numel, begin + split));
    }
    step += 1.0f;
  }

  std::uint32_t master(std::size_t i) const {
    if (!remainders) return masters[i];
    return join_master({params[i], static_cast<std::uint16_t>(lows[i])});
  }

  std::int64_t numel;
  std::vector<float> grads, first, second, third;
  std::vector<std::uint16_t> params;
  std::vector<std::int16_t> lows;
  std::vector<std::uint32_t> masters;
  bool remainders;
  float step = 1.0f;
  StepScalars scalars{1.0, 0.0f, 0.0f};
};

/// Runs both and compares after every step.
void expect_same_masters(double lr, double weight_decay) {
  AdamParams group;
  group.lr.value = lr;
  group.beta1.value = 0.9;
  group.beta2.value = 0.999;
  group.eps.value = 1e-8;
  group.weight_decay.value = weight_decay;
  for (const CpuIsa isa : testing::levels_here()) {
    SCOPED_TRACE(name_of(isa));
    Problem whole(masters(), false);
    Problem halves(masters(), true);
    for (int step = 0; step < 3; ++step) {
      whole.update(isa, group, whole.numel);
      halves.update(isa, group, 7919);
      for (std::size_t i = 0; i < whole.masters.size(); ++i) {
        const std::uint32_t expected = whole.master(i);
        ASSERT_EQ(halves.master(i), is_nan(expected) ? 0x7fc00000u : expected) << i;
        ASSERT_EQ(halves.params[i], split_master(expected).param) << i;
        ASSERT_TRUE(halves.first[i] == whole.first[i] ||
                    (std::isnan(halves.first[i]) && std::isnan(whole.first[i])))
            << i;
      }
    }
  }
}

TEST(ParamRemainder, TheDriverGivesTheMastersOfARunInFp32) {
  expect_same_masters(1e-2, 0.1);
  expect_same_masters(1e-30, 0.0);  // changes nothing that is not denormal
  expect_same_masters(3e38, 0.0);   // overflows
}

/// As after a write of zeros, or of other values, beside remainders of other parameters.
TEST(ParamRemainder, TheDriverReadsEveryPairOfHalves) {
  for (const CpuIsa isa : testing::levels_here()) {
    SCOPED_TRACE(name_of(isa));
    Problem halves(masters(), true);
    Problem whole(masters(), false);
    for (std::size_t i = 0; i < halves.params.size(); ++i) {
      halves.params[i] = static_cast<std::uint16_t>(halves.masters[i] >> 16);
      halves.lows[i] = static_cast<std::int16_t>(halves.masters[i] & 0xffffu);
      whole.masters[i] = joined(halves.params[i], halves.lows[i]);
    }
    AdamParams group;
    group.lr.value = 1e-2;
    group.beta1.value = 0.9;
    group.beta2.value = 0.999;
    group.eps.value = 1e-8;
    halves.update(isa, group, halves.numel);
    whole.update(isa, group, whole.numel);
    for (std::size_t i = 0; i < whole.masters.size(); ++i) {
      const std::uint32_t expected = whole.master(i);
      ASSERT_EQ(halves.master(i), is_nan(expected) ? 0x7fc00000u : expected) << i;
    }
  }
}

TEST(ParamRemainder, InfiniteAndLargestMasters) {
  using Limits = std::numeric_limits<float>;
  const SplitMaster infinite = split_master(float_bits(Limits::infinity()));
  EXPECT_EQ(infinite.param, 0x7f80);
  EXPECT_EQ(infinite.remainder, 0);
  // The largest float lies nearer to 2^128 than to any bf16; it is not lost.
  const SplitMaster largest = split_master(float_bits(Limits::max()));
  EXPECT_EQ(largest.param, 0x7f80);
  EXPECT_EQ(bits_to_float(join_master(largest)), Limits::max());
  EXPECT_EQ(split_master(0xffffffffu).param, 0x7fc0) << "a NaN must not become a zero";
}

}  // namespace
}  // namespace torchfuse::kernels
