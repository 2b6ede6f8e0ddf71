// SPDX-License-Identifier: BSD-3-Clause
// The update kernels with the Adam functor give the CPU driver's bits: for every dtype tuple, size,
// number of tensors and of groups, mode and address.
#include <gtest/gtest.h>

#include <algorithm>

#include "update_problem.h"

namespace torchfuse::kernels::testing {
namespace {

using Packing = UpdateProblem::Packing;
using Passed = UpdateGroups::Passed;

class CudaFusedUpdateTuple : public ::testing::TestWithParam<UpdateTuple> {};

TEST_P(CudaFusedUpdateTuple, EverySizeGivesTheBitsOfTheCpu) {
  for (const std::int32_t seed : {0, 1, 2}) {
    // Scattered; alike, and some tensors without the third state; alike.
    const std::int32_t num_groups = 3 - seed;
    const UpdateGroups groups = UpdateGroups::distinct(num_groups);
    const std::uint32_t dice = static_cast<std::uint32_t>(seed);
    const std::vector<std::int64_t> sizes = border_sizes(GetParam().vec(), dice);
    const auto middle = sizes.begin() + std::ssize(sizes) / 2;
    // The halves fit into short launches.
    for (const std::vector<std::int64_t>& list :
         {sizes, {sizes.begin(), middle}, {middle, sizes.end()}}) {
      UpdateProblem problem(GetParam(), tensors_of(list, num_groups, dice), groups);
      problem.write_back_grads = seed != 0;
      problem.from_the_end = seed == 1;
      problem.pack(dice, seed == 0 ? Packing::kScattered : Packing::kAlike);
      problem.run({.seed = dice, .resident_blocks = 1u << dice});
    }
  }
}

TEST_P(CudaFusedUpdateTuple, EveryModeGivesTheBitsOfTheCpu) {
  for (const Passed passed : {Passed::kByValue, Passed::kByPointer}) {
    const UpdateGroups groups = UpdateGroups::distinct(16, passed);
    for (const bool write_back : {false, true}) {
      UpdateProblem problem(GetParam(), tensors_of(std::vector<std::int64_t>(64, 117), 16, 3),
                            groups);
      problem.write_back_grads = write_back;
      problem.scalars.grad_coef = write_back ? 1.0 : -1.0 / 3.0;
      problem.pack(4);
      problem.run({.seed = 5});
    }
  }
}

TEST_P(CudaFusedUpdateTuple, ASkippedStepTouchesNothing) {
  const UpdateGroups groups = UpdateGroups::distinct(3);
  UpdateProblem problem(GetParam(), tensors_of({1, 100, 512, 513, 2500}, 3, 6), groups);
  problem.write_back_grads = true;
  problem.pack(7);
  for (const float skip : {1.0f, 2.0f, -0.5f}) {
    problem.scalars.skip = skip;
    problem.run({.seed = 8});
  }
}

INSTANTIATE_TEST_SUITE_P(All, CudaFusedUpdateTuple, ::testing::ValuesIn(update_tuples()),
                         [](const auto& tuple) { return tuple.param.name(); });

TEST(CudaFusedUpdate, SixteenTuplesHaveAKernelOfTheirOwnAndFourOneThatMovesAverages) {
  EXPECT_EQ(own_tuples().size(), 16);
  const auto tuples = ema_tuples();
  const auto typed = [](const UpdateTuple& tuple) {
    return has_typed_ema_kernel(tuple.table(), 3);
  };
  EXPECT_EQ(std::count_if(tuples.begin(), tuples.end(), typed), 4);
  for (const UpdateTuple& tuple : mixed_tuples()) {
    EXPECT_FALSE(has_typed_kernel(tuple.table(), 3)) << tuple.name();
    EXPECT_TRUE(has_looked_up_kernel(tuple.table(), 3)) << tuple.name();
  }
}

TEST(CudaFusedUpdate, OtherTuplesAreRefusedByName) {
  const UpdateGroups groups = UpdateGroups::distinct(1);
  auto unknown = tuples_where([](const TensorTable& table) {
    return !has_typed_kernel(table, 3) && !has_looked_up_kernel(table, 3);
  });
  ASSERT_FALSE(unknown.empty());
  for (UpdateTuple tuple : std::vector<UpdateTuple>(unknown)) {
    tuple.has_ema = true;
    unknown.push_back(tuple);
  }
  for (const UpdateTuple& tuple : unknown) {
    SCOPED_TRACE(tuple.name());
    UpdateProblem problem(tuple, {{5}, {600}}, groups);
    problem.write_back_grads = true;
    problem.pack(1);
    const Status status = problem.launch({});
    EXPECT_NE(status.error, 0);
    EXPECT_NE(std::string(status.what)
                  .find("not built for this tuple of parameter, gradient, "
                        "state and master dtypes"),
              std::string::npos)
        << status.what;
    problem.expect_untouched();
  }
}

TEST(CudaFusedUpdate, AnyNumberOfTensors) {
  const UpdateGroups groups = UpdateGroups::distinct(3);
  const UpdateTuple master{DType::kBFloat16, DType::kBFloat16, DType::kFloat32, true};
  for (const std::uint32_t count : {0, 1, 2, 33, 1200, 5000}) {  // several launches from 400 on
    SCOPED_TRACE(count);
    UpdateProblem problem(count % 3 == 0 ? master : UpdateTuple{},
                          tensors_of(random_sizes(count, count), 3, count), groups);
    problem.pack(count, count == 5000 ? Packing::kAlike : Packing::kScattered);
    problem.run({.seed = count + 1, .resident_blocks = 4});
  }
  // Empty ones alone and among others.
  for (const std::vector<std::int64_t>& sizes :
       {std::vector<std::int64_t>(500, 0), std::vector<std::int64_t>{0, 3, 0, 0, 600, 0}}) {
    UpdateProblem problem({}, tensors_of(sizes, 3, 1), groups);
    problem.pack(2);
    problem.run({.seed = 3});
    problem.rows_on_device = true;
    problem.run({.seed = 3});
  }
}

TEST(CudaFusedUpdate, AnyNumberOfGroups) {
  for (const Passed passed : {Passed::kByValue, Passed::kByPointer}) {
    for (const std::int32_t count : {1, 3, 200}) {  // more than a launch holds
      SCOPED_TRACE(count);
      const UpdateGroups groups = UpdateGroups::distinct(count, passed);
      UpdateProblem problem({}, tensors_of(random_sizes(450, 9), count, 10), groups);
      problem.pack(11, passed == Passed::kByValue ? Packing::kAlike : Packing::kScattered);
      problem.run({.seed = 12});
    }
  }
}

TEST(CudaFusedUpdate, TensorsOfOneGroupNeedNotBeNeighbors) {
  const UpdateGroups groups = UpdateGroups::distinct(60);
  std::mt19937 random(13);
  std::vector<UpdateTensor> tensors;
  for (std::uint32_t i = 0; i < 300; ++i) {
    const std::int32_t group = static_cast<std::int32_t>(random() % 60);
    tensors.push_back({static_cast<std::int64_t>(random() % 30), group, 1.0f, i});
  }
  UpdateProblem problem({}, tensors, groups);
  problem.pack(14);
  problem.run({.seed = 15});
}

TEST(CudaFusedUpdate, ExtremeHyperParametersAndCounts) {
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  std::vector<AdamParams> groups(6);
  groups[1] = distinct_group(0);
  groups[1].lr.value = 0.0;
  groups[2] = distinct_group(0);
  groups[2].lr.value = 1e30;
  groups[3] = distinct_group(0);
  groups[3].eps.value = inf;
  groups[4] = distinct_group(0);
  groups[4].beta2.value = 1.0;
  groups[5] = distinct_group(0);
  groups[5].weight_decay.value = nan;
  const UpdateGroups all(groups);
  std::vector<UpdateTensor> tensors;
  for (std::int32_t group = 0; group < 6; ++group) {
    for (const float step : {0.0f, 1.0f, 16777216.0f}) {
      tensors.push_back({70, group, step, static_cast<std::uint32_t>(tensors.size())});
    }
  }
  const DType wide = DType::kFloat64;
  for (const UpdateTuple& tuple : {UpdateTuple{}, UpdateTuple{wide, wide, wide}}) {
    for (const double grad_coef : {0.0, 1e-42, 1e30, inf, nan}) {
      UpdateProblem problem(tuple, tensors, all);
      problem.scalars.grad_coef = grad_coef;
      problem.write_back_grads = true;
      problem.pack(16);
      problem.run({.seed = 17});
    }
  }
}

// As behind large loss scales: every element of every storage, with several chunks of a tensor.
TEST(CudaFusedUpdate, TinyCoefficients) {
  const UpdateGroups groups = UpdateGroups::distinct(3);
  std::vector<UpdateTuple> tuples{UpdateTuple{}};
  for (const auto& more : {mixed_tuples(), ema_tuples()}) {
    tuples.insert(tuples.end(), more.begin(), more.end());
  }
  for (const UpdateTuple& tuple : tuples) {
    UpdateProblem problem(tuple, tensors_of({1, 70, 511, 5003}, 3, 21), groups);
    problem.scalars.grad_coef = 0x1.8p-127;
    problem.write_back_grads = true;
    problem.pack(22);
    problem.run({.seed = 23});
  }
}

// Up to eight small tensors in a block, coefficients handed over at its barrier, several blocks of
// a tensor: little enough for a race detector.
TEST(CudaFusedUpdate, SmallListsHaveNoRaces) {
  const UpdateGroups groups = UpdateGroups::distinct(3, Passed::kByPointer);
  const UpdateTuple master{DType::kBFloat16, DType::kBFloat16, DType::kFloat32, true};
  const UpdateTuple half{DType::kFloat16, DType::kFloat32, DType::kFloat16};
  for (const UpdateTuple& tuple :
       {UpdateTuple{}, master, half, mixed_tuples()[2], mixed_tuples()[6], mixed_tuples()[8],
        ema_tuples()[0], ema_tuples()[5]}) {
    for (const std::uint32_t seed : {1, 2}) {
      const std::int64_t two_chunks = 2 * 256 * tuple.vec();
      UpdateProblem problem(
          tuple, tensors_of({0, 1, 2, 31, 40, 65, 200, 511, 512, 514, two_chunks + 17}, 3, seed),
          groups);
      problem.write_back_grads = seed == 1;
      problem.pack(seed);
      problem.run({.seed = seed, .resident_blocks = 4});
      problem.scalars.skip = 1.0f;
      problem.run({.seed = seed, .resident_blocks = 4});
    }
  }
}

// --- At any address: one access to each element, as few instructions as addresses allow ----------

std::vector<Part> parts_of(const UpdateTuple& tuple) {
  std::vector<Part> parts{kParam, kGrad, kFirst, kSecond, kMaximum};
  if (tuple.has_master || tuple.has_remainder) parts.push_back(kMaster);
  return parts;
}

/// `count` tensors of these sizes in turn.
std::vector<UpdateTensor> tensors_in_turn(std::size_t count,
                                          const std::vector<std::int64_t>& sizes) {
  std::vector<UpdateTensor> tensors;
  for (std::size_t t = 0; t < count; ++t) {
    tensors.push_back({sizes[t % sizes.size()], 0, 3.0f, static_cast<std::uint32_t>(t)});
  }
  return tensors;
}

/// Uses all states.
UpdateGroups one_group() { return UpdateGroups::distinct(1); }

class CudaFusedUpdateAddresses : public ::testing::TestWithParam<UpdateTuple> {};

TEST_P(CudaFusedUpdateAddresses, EveryMisalignmentOfOneStreamOrOfAll) {
  const UpdateTuple tuple = GetParam();
  const std::vector<std::int64_t> sizes{3, 100, 256 * tuple.vec() + 17};
  std::vector<std::vector<int>> cases{std::vector<int>(kParts, 0)};  // misalignment by part
  for (int elements = 1; elements < tuple.vec(); ++elements) {
    cases.push_back(std::vector<int>(kParts, elements));
    for (const Part part : parts_of(tuple)) {
      cases.emplace_back(kParts, 0);
      cases.back()[part] = elements;
    }
  }
  const UpdateGroups groups = one_group();
  UpdateProblem problem(tuple, tensors_in_turn(cases.size() * sizes.size(), sizes), groups);
  problem.set_apart([&](Part part, std::size_t t) { return cases[t / sizes.size()][part]; });
  for (const bool write_back : {false, true}) {
    problem.write_back_grads = write_back;
    problem.run({.seed = 1});
  }
}

TEST_P(CudaFusedUpdateAddresses, RandomMisalignments) {
  const UpdateTuple tuple = GetParam();
  const UpdateGroups groups = UpdateGroups::distinct(8);
  for (const std::uint32_t seed : {1, 2}) {
    std::mt19937 random(seed);
    std::vector<UpdateTensor> tensors = tensors_in_turn(
        40, {1, 7, 8, 9, 33, 511, 512, 513, 256 * tuple.vec(), 512 * tuple.vec() - 1});
    for (UpdateTensor& tensor : tensors) tensor.group = static_cast<std::int32_t>(random() % 8);
    UpdateProblem problem(tuple, tensors, groups);
    problem.write_back_grads = seed == 2;
    problem.set_apart([&](Part, std::size_t) { return random() % 8; });
    problem.run({.seed = seed, .resident_blocks = 3});
  }
}

TEST_P(CudaFusedUpdateAddresses, AlignedTensorsTakeNothingButVectors) {
  const UpdateTuple tuple = GetParam();
  const std::int64_t vec = tuple.vec();
  const UpdateGroups groups = one_group();
  UpdateProblem problem(tuple, tensors_in_turn(4, {vec, 496, 520, 300 * vec}), groups);
  problem.set_apart([](Part, std::size_t) { return 0; });
  problem.run({.seed = 3});
  if (!accesses_are_counted()) return;
  const std::size_t elements = static_cast<std::size_t>(vec + 496 + 520 + 300 * vec);
  for (const Part part : parts_of(tuple)) {
    SCOPED_TRACE(name_of(part));
    const std::size_t accesses = elements * size_of(tuple.dtype(part)) / 16;
    const bool write_only = part == kParam && tuple.has_master;
    EXPECT_EQ(problem.traffic(part).loads, write_only ? 0 : accesses);
    EXPECT_EQ(problem.traffic(part).stores, part == kGrad ? 0 : accesses);
  }
}

TEST_P(CudaFusedUpdateAddresses, ThreadsPrefetchTheirFirstVectorOfWhatTheyRead) {
  const UpdateTuple tuple = GetParam();
  const auto vec = static_cast<std::size_t>(tuple.vec());
  const UpdateGroups groups = one_group();
  UpdateProblem problem(tuple, tensors_in_turn(4, {tuple.vec(), 496, 520, 300 * tuple.vec()}),
                        groups);
  problem.set_apart([](Part, std::size_t) { return 0; });
  for (const bool rows_on_device : {false, true}) {
    problem.rows_on_device = rows_on_device;
    problem.run({.seed = 5});
    if (!accesses_are_counted()) return;
    // Chunks have 256 vectors. Those of kept rows have 2,048 elements, also of wide types.
    const auto threads_for = [&](std::size_t vectors) {
      return rows_on_device && vec < 8 ? std::min<std::size_t>(256, vectors) : vectors;
    };
    const std::size_t threads = 1 + 32 + threads_for(520 / vec) + threads_for(300);
    for (const Part part : parts_of(tuple)) {
      SCOPED_TRACE(name_of(part));
      const bool write_only = part == kParam && tuple.has_master;
      EXPECT_EQ(problem.traffic(part).prefetches, write_only ? 0 : threads);
    }
  }
}

// The head is peeled once in each chunk, so that the number of instructions tells the chunk.
TEST_P(CudaFusedUpdateAddresses, LongListsTakeLargeChunks) {
  const UpdateTuple tuple = GetParam();
  const UpdateGroups groups = one_group();
  for (std::int64_t chunk = 16384; chunk > 256 * tuple.vec(); chunk /= 4) {
    UpdateProblem problem(tuple, tensors_in_turn(2, {2 * chunk + 17, chunk}), groups);
    problem.set_apart([](Part, std::size_t) { return 1; });
    for (const std::int64_t total : {4096 * chunk, 4096 * chunk - 1}) {
      SCOPED_TRACE(total);
      problem.claimed_total = total;
      problem.run({.seed = 4});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, CudaFusedUpdateAddresses, ::testing::ValuesIn(update_tuples()),
                         [](const auto& tuple) { return tuple.param.name(); });

TEST(CudaFusedUpdateLayout, SmallListsAtEveryKindOfAddress) {
  const UpdateGroups groups = one_group();
  const UpdateTuple tuple{DType::kFloat16, DType::kFloat16, DType::kFloat32, true};
  UpdateProblem problem(tuple, tensors_in_turn(12, {20, 513, 70, 33}), groups);
  problem.write_back_grads = true;
  // Nothing misaligned, all alike, the gradient alone, everything differently.
  problem.set_apart([](Part part, std::size_t t) -> std::size_t {
    if (t < 3) return 0;
    if (t < 6) return 3;
    if (t < 9) return part == kGrad ? t - 5 : 0;
    return t * static_cast<std::size_t>(part + 1) % 8;
  });
  problem.run({.seed = 11, .resident_blocks = 4});
}

TEST(CudaAlignment, LegalWidthIsTheLargestPowerOfTwoThatDividesTheAddress) {
  for (std::uintptr_t address = 0; address < 64; ++address) {
    EXPECT_EQ(cuda::legal_width(0x7f0000000000 + address), std::gcd(address, std::uintptr_t{16}));
  }
}

/// Instructions for one vector of every operand behind `head` elements.
std::uint32_t cost_of(const std::vector<cuda::OperandAccess>& operands, std::uint32_t head,
                      std::uint32_t vec) {
  std::uint32_t cost = 0;
  for (const cuda::OperandAccess& operand : operands) {
    const std::uintptr_t address = operand.address + head * operand.element_size;
    for (const std::uint32_t width : {2u, 4u, 8u, 16u}) {
      if (std::gcd(address, std::uintptr_t{16}) == width) {
        cost += operand.uses * vec * operand.element_size / width;
      }
    }
  }
  return cost;
}

TEST(CudaAlignment, NoOtherHeadIsCheaper) {
  std::mt19937 random(12);
  int aligned = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    std::vector<cuda::OperandAccess> operands(1 + random() % 6);
    const std::uint32_t common = random() % 8;
    for (cuda::OperandAccess& operand : operands) {
      operand.element_size = 2u << random() % 2;
      const std::uint32_t elements = random() % 4 != 0 ? common : random() % 8;
      operand.address = 0x7f0000000000 + elements * operand.element_size;
      operand.uses = 1 + random() % 2;
    }
    constexpr std::uint32_t kVec = 8;
    const cuda::Peeling peeling =
        cuda::best_peeling(operands.data(), static_cast<int>(operands.size()), kVec);
    ASSERT_LT(peeling.head, kVec);
    const std::uint32_t cost = cost_of(operands, peeling.head, kVec);
    std::uint32_t vectors = 0;
    for (const cuda::OperandAccess& operand : operands) {
      vectors += operand.uses * kVec * operand.element_size / 16;
    }
    ASSERT_EQ(peeling.aligned, cost == vectors);
    for (std::uint32_t head = 0; head < kVec; ++head) {
      ASSERT_TRUE(cost < cost_of(operands, head, kVec) ||
                  (cost == cost_of(operands, head, kVec) && peeling.head <= head));
    }
    aligned += peeling.aligned ? 1 : 0;
  }
  EXPECT_GT(aligned, 1000);
  EXPECT_LT(aligned, 19000);
}

}  // namespace
}  // namespace torchfuse::kernels::testing
