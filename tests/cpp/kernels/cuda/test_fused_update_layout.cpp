// SPDX-License-Identifier: BSD-3-Clause
// The update kernels at any address: the bits of the CPU driver, one access to each element, and as
// few instructions as addresses allow.
#include <gtest/gtest.h>

#include "update_problem.h"

namespace torchfuse::kernels::testing {
namespace {

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
