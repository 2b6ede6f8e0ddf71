// SPDX-License-Identifier: BSD-3-Clause
// The update kernels at any address: the bits of the CPU driver, one access to each element, and as
// few instructions as addresses allow. Results depend on a tensor alone, not on the list.
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

TEST(CudaFusedUpdateLayout, ATensorsBitsDependOnNothingButTheTensor) {
  const UpdateGroups groups = UpdateGroups::distinct(3);
  const UpdateTuple tuple{DType::kBFloat16, DType::kFloat32, DType::kFloat32, true};
  std::mt19937 random(5);
  std::vector<UpdateTensor> list;
  for (std::uint32_t i = 0; i < 40; ++i) {
    const std::int64_t numel = static_cast<std::int64_t>(random() % (i % 4 == 0 ? 5000 : 600));
    list.push_back({numel, static_cast<std::int32_t>(i % 3), static_cast<float>(i + 1), i});
  }
  UpdateProblem whole(tuple, list, groups);
  whole.pack(6);
  whole.run({.seed = 7});

  const auto expect_same = [&](const UpdateProblem& other, const std::vector<std::uint32_t>& ids) {
    for (std::size_t t = 0; t < ids.size(); ++t) {
      for (const Part part : parts_of(tuple)) {
        ASSERT_EQ(first_difference(other.result(part), other.offset(t), whole.result(part),
                                   whole.offset(ids[t]), list[ids[t]].numel),
                  list[ids[t]].numel)
            << name_of(part) << " of tensor " << ids[t];
      }
    }
  };
  std::vector<std::uint32_t> order(list.size());
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), random);
  std::vector<UpdateTensor> shuffled;
  for (const std::uint32_t id : order) shuffled.push_back(list[id]);
  UpdateProblem permuted(tuple, shuffled, groups);
  permuted.claimed_total = std::int64_t{1} << 40;
  permuted.pack(8);
  permuted.run({.seed = 9, .resident_blocks = 4});
  expect_same(permuted, order);
  for (const UpdateTensor& tensor : list) {
    UpdateProblem alone(tuple, {tensor}, groups);
    alone.pack(10 + tensor.seed);
    alone.run({.seed = 0, .resident_blocks = 1});
    expect_same(alone, {tensor.seed});
  }
}

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

/// Instructions for one vector of every stream behind `head` elements.
std::uint32_t cost_of(const std::vector<cuda::OperandAccess>& streams, std::uint32_t head,
                      std::uint32_t vec) {
  std::uint32_t cost = 0;
  for (const cuda::OperandAccess& stream : streams) {
    const std::uintptr_t address = stream.address + head * stream.element_size;
    for (const std::uint32_t width : {2u, 4u, 8u, 16u}) {
      if (std::gcd(address, std::uintptr_t{16}) == width) {
        cost += stream.uses * vec * stream.element_size / width;
      }
    }
  }
  return cost;
}

TEST(CudaAlignment, NoOtherHeadIsCheaper) {
  std::mt19937 random(12);
  int aligned = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    std::vector<cuda::OperandAccess> streams(1 + random() % 6);
    const std::uint32_t common = random() % 8;
    for (cuda::OperandAccess& stream : streams) {
      stream.element_size = 2u << random() % 2;
      const std::uint32_t elements = random() % 4 != 0 ? common : random() % 8;
      stream.address = 0x7f0000000000 + elements * stream.element_size;
      stream.uses = 1 + random() % 2;
    }
    constexpr std::uint32_t kVec = 8;
    const cuda::Peeling peeling =
        cuda::best_peeling(streams.data(), static_cast<int>(streams.size()), kVec);
    ASSERT_LT(peeling.head, kVec);
    const std::uint32_t cost = cost_of(streams, peeling.head, kVec);
    std::uint32_t vectors = 0;
    for (const cuda::OperandAccess& stream : streams) {
      vectors += stream.uses * kVec * stream.element_size / 16;
    }
    ASSERT_EQ(peeling.aligned, cost == vectors);
    for (std::uint32_t head = 0; head < kVec; ++head) {
      ASSERT_TRUE(cost < cost_of(streams, head, kVec) ||
                  (cost == cost_of(streams, head, kVec) && peeling.head <= head));
    }
    aligned += peeling.aligned ? 1 : 0;
  }
  EXPECT_GT(aligned, 1000);
  EXPECT_LT(aligned, 19000);
}

}  // namespace
}  // namespace torchfuse::kernels::testing
