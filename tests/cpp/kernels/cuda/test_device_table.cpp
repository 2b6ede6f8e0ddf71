// SPDX-License-Identifier: BSD-3-Clause
// Launches whose rows lie on the device give the bits of those that carry them by value, whatever
// gradients a step has. See Note [Device tables].
#include <gtest/gtest.h>

#include <limits>

#include "norm_partials.h"
#include "update_problem.h"

namespace torchfuse::kernels::testing {
namespace {

using Packing = UpdateProblem::Packing;
using Passed = UpdateGroups::Passed;

/// Sizes for more than two spans, most of which leave the next tensor aligned.
std::vector<UpdateTensor> many_tensors(std::int32_t count, std::int32_t groups) {
  std::vector<UpdateTensor> tensors;
  for (std::int32_t i = 0; i < count; ++i) {
    std::int64_t numel = 8 * (1 + i % 9);
    if (i % 50 < 2) numel = i % 2 == 0 ? 5 : 3;  // the second one is misaligned
    if (i % 211 == 7) numel = 0;
    if (i % 97 == 9) numel = 600;
    if (i % 1001 == 11) numel = 5000;
    tensors.push_back(
        {numel, i % groups, static_cast<float>(1 + i % 5), static_cast<std::uint32_t>(i)});
  }
  return tensors;
}

class CudaDeviceTableTuple : public ::testing::TestWithParam<UpdateTuple> {};

TEST_P(CudaDeviceTableTuple, EverySizeGivesTheBitsOfTheCpu) {
  for (const std::uint32_t seed : {0, 1}) {
    const UpdateGroups groups = UpdateGroups::distinct(3);
    UpdateProblem problem(GetParam(), tensors_of(border_sizes(GetParam().vec(), seed), 3, seed),
                          groups);
    problem.rows_on_device = true;
    problem.write_back_grads = seed != 0;
    problem.from_the_end = seed != 0;
    // Aligned operands, but for some gradients.
    problem.set_apart(
        [&](Part part, std::size_t t) { return part == kGrad && seed != 0 && t % 3 == 0 ? 1 : 0; });
    problem.run({.seed = seed, .resident_blocks = 1u << seed});
  }
}

INSTANTIATE_TEST_SUITE_P(All, CudaDeviceTableTuple, ::testing::ValuesIn(update_tuples()),
                         [](const auto& tuple) { return tuple.param.name(); });

TEST(CudaDeviceTable, ListsOfSeveralSpansAndOnesWithoutAnAlignedRow) {
  const UpdateGroups groups = UpdateGroups::distinct(3);
  const UpdateTuple master{DType::kBFloat16, DType::kBFloat16, DType::kFloat32, true};
  for (const UpdateTuple& tuple : {UpdateTuple{}, master}) {
    UpdateProblem problem(tuple, many_tensors(7000, 3), groups);
    problem.rows_on_device = true;
    problem.from_the_end = tuple.has_master;
    for (const Packing packing : {Packing::kInOrder, Packing::kScattered}) {
      problem.pack(3, packing);
      problem.run({.seed = 2, .resident_blocks = 4});
    }
  }
}

TEST(CudaDeviceTable, AnyNumberOfGroups) {
  for (const Passed passed : {Passed::kByValue, Passed::kByPointer}) {
    for (const std::int32_t count : {1, 20, 200}) {  // 200: more than a launch holds
      SCOPED_TRACE(count);
      const UpdateGroups groups = UpdateGroups::distinct(count, passed);
      UpdateProblem problem({}, many_tensors(450, count), groups);
      problem.rows_on_device = true;
      problem.pack(5, Packing::kInOrder);
      problem.run({.seed = 6});
    }
  }
}

TEST(CudaDeviceTable, ChunksOfTheLongestLists) {
  const UpdateGroups groups = UpdateGroups::distinct(1);
  UpdateProblem problem({}, tensors_of({16384, 16385, 40000, 512, 513, 7}, 1, 9), groups);
  problem.rows_on_device = true;
  problem.claimed_total = std::int64_t{1} << 30;
  problem.set_apart([](Part, std::size_t) { return 0; });
  problem.run({.seed = 10});
}

// Little enough for a race detector.
TEST(CudaDeviceTable, SmallListsHaveNoRaces) {
  const UpdateGroups groups = UpdateGroups::distinct(3, Passed::kByPointer);
  for (const float skip : {0.0f, 1.0f}) {
    UpdateProblem problem({}, tensors_of({0, 1, 2, 31, 40, 65, 200, 511, 512, 514, 2500}, 3, 11),
                          groups);
    problem.rows_on_device = true;
    problem.scalars.skip = skip;
    problem.set_apart([](Part part, std::size_t t) { return part == kGrad && t == 4 ? 1 : 0; });
    problem.run({.seed = 12, .resident_blocks = 4});
  }
}

TEST(CudaDeviceTable, NormsHaveTheBitsOfLaunchesByValue) {
  std::mt19937 random(13);
  for (const DType dtype : kEveryDType) {
    for (const std::int64_t elements : {std::int64_t{2048}, kNormChunk}) {
      std::vector<std::int64_t> sizes;
      std::int64_t total = 0;
      for (const UpdateTensor& tensor : many_tensors(dtype == DType::kFloat32 ? 8000 : 500, 1)) {
        sizes.push_back(tensor.numel);
        total += tensor.numel;
      }
      Buffer contents(dtype, total);
      contents.fill_normal(random);
      GradientList list(dtype);
      list.add_packed(contents, sizes, 1);
      set_order_for(dtype, 14);
      const auto expected = partials_of(list, elements);
      set_order_for(dtype, 15, 4);
      EXPECT_TRUE(same_bits(partials_of(list, elements, true), expected));
    }
  }
}

TEST(CudaDeviceTable, SmallListsHaveANormWithoutRaces) {
  std::mt19937 random(16);
  GradientList list(DType::kFloat32);
  for (const std::int64_t numel : {1, 511, 0, 513, 7, 5000}) {
    list.add(whole_numbers(DType::kFloat32, numel, random), 1);
  }
  const auto expected = partials_of(list);
  set_order_for(DType::kFloat32, 17, 4);
  EXPECT_TRUE(same_bits(partials_of(list, kNormChunk, true), expected));
}

}  // namespace
}  // namespace torchfuse::kernels::testing
