// SPDX-License-Identifier: BSD-3-Clause
// Masters as bf16 parameters and remainders: every bf16 with remainders all over, by themselves and
// through the update driver, which must give the masters of a run with fp32 masters.
#include "kernels/common/param_remainder.h"

#include <gtest/gtest.h>

#include <limits>

#include "optimizer_cases.h"
#include "optimizer_problem.h"

namespace torchfuse::kernels::testing {
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

TEST(ParamRemainder, EveryMasterIsTheSumOfItsHalvesAsSignedNumbers) {
  for (const std::uint32_t bits : masters()) {
    const SplitMaster halves = split_master(bits);
    ASSERT_EQ(join_master(halves), is_nan(bits) ? 0x7fc00000u : bits) << std::hex << bits;
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

AdamParams adam(double lr, double weight_decay) {
  AdamParams group = OptimizerCase<Adam>::group(9);
  group.lr.value = lr;
  group.weight_decay.value = weight_decay;
  return group;
}

UpdateTuple tuple_with(bool remainders) {
  return {DType::kBFloat16, DType::kFloat32, DType::kFloat32, !remainders, {}, remainders};
}

/// All masters(), in fp32 or as remainders.
TensorList first_contents(bool remainders) {
  const std::vector<std::uint32_t> all = masters();
  TensorList list =
      contents_of<Adam>(tuple_with(remainders), {static_cast<std::int64_t>(all.size())});
  auto* params = static_cast<std::uint16_t*>(list[0].parts[kParam].data());
  void* kept = list[0].parts[kMaster].data();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const SplitMaster halves = split_master(all[i]);
    params[i] = halves.param;
    if (remainders) static_cast<std::uint16_t*>(kept)[i] = halves.remainder;
    if (!remainders) static_cast<std::uint32_t*>(kept)[i] = all[i];
  }
  return list;
}

/// One tensor of them.
struct Problem {
  explicit Problem(bool remainders) : tuple(tuple_with(remainders)) {
    static const TensorList kWholes = first_contents(false);
    list = kWholes;
    if (!remainders) return;
    static const TensorList kHalves = first_contents(true);
    for (const Part part : {kParam, kMaster}) list[0].parts[part] = kHalves[0].parts[part];
  }

  template <class T>
  T* part(Part which) {
    return static_cast<T*>(list[0].parts[which].data());
  }

  void update(CpuIsa isa, const AdamParams& group, std::int64_t span = kWhole) {
    OptimizerProblem<Adam>(tuple, list, {group}, &step).run_on_cpu({1.0, 0.0f, 0.0f}, isa, span);
    step += 1.0f;
  }

  UpdateTuple tuple;
  TensorList list;
  float step = 1.0f;
};

/// After a step of each: `halves` must be those of the masters of `whole`.
void expect_same_masters(Problem& halves, Problem& whole) {
  const auto* params = halves.part<std::uint16_t>(kParam);
  const auto* lows = halves.part<std::uint16_t>(kMaster);
  const auto* expected = whole.part<std::uint32_t>(kMaster);
  const auto* first = halves.part<float>(kFirst);
  const auto* expected_first = whole.part<float>(kFirst);
  const std::int64_t count = whole.list[0].parts[kMaster].numel();
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t bits = is_nan(expected[i]) ? 0x7fc00000u : expected[i];
    ASSERT_EQ(join_master({params[i], lows[i]}), bits) << i;
    ASSERT_EQ(params[i], split_master(bits).param) << i;
    ASSERT_TRUE(first[i] == expected_first[i] ||
                (std::isnan(first[i]) && std::isnan(expected_first[i])))
        << i;
  }
}

TEST(ParamRemainder, TheDriverGivesTheMastersOfARunInFp32) {
  // The second changes nothing that is not denormal, the third overflows.
  for (const AdamParams& group : {adam(1e-2, 0.1), adam(1e-30, 0.0), adam(3e38, 0.0)}) {
    for (const CpuIsa isa : levels_here()) {
      SCOPED_TRACE(std::string(name_of(isa)) + ", lr " + std::to_string(group.lr.value));
      Problem whole(false);
      Problem halves(true);
      for (int step = 0; step < 3; ++step) {
        whole.update(isa, group);
        halves.update(isa, group, 7919);
        ASSERT_NO_FATAL_FAILURE(expect_same_masters(halves, whole));
      }
    }
  }
}

/// As after a write of zeros, or of other values, beside remainders of other parameters.
TEST(ParamRemainder, TheDriverReadsEveryPairOfHalves) {
  const std::vector<std::uint32_t> all = masters();
  for (const CpuIsa isa : levels_here()) {
    SCOPED_TRACE(name_of(isa));
    Problem halves(true);
    Problem whole(false);
    for (std::size_t i = 0; i < all.size(); ++i) {
      const std::uint32_t param = all[i] >> 16;
      halves.part<std::uint16_t>(kParam)[i] = static_cast<std::uint16_t>(param);
      halves.part<std::uint16_t>(kMaster)[i] = static_cast<std::uint16_t>(all[i]);
      whole.part<std::uint32_t>(kMaster)[i] = joined(param, static_cast<std::int16_t>(all[i]));
    }
    halves.update(isa, adam(1e-2, 0.1));
    whole.update(isa, adam(1e-2, 0.1));
    expect_same_masters(halves, whole);
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
}  // namespace torchfuse::kernels::testing
