// SPDX-License-Identifier: BSD-3-Clause
// In which order an update walks through its elements: blocks run one by one, and what each changes
// is looked up.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "engine.h"
#include "kernels/cuda/rows_on_device.h"
#include "kernels/optimizer_cases.h"
#include "kernels/optimizer_problem.h"

namespace cuda_on_cpu {
namespace {

using namespace torchfuse::kernels;
using namespace torchfuse::kernels::testing;

/// A tensor and a chunk of it.
using Chunk = std::pair<std::size_t, std::int64_t>;

/// Elements that a block handles in lists as short as these.
constexpr std::int64_t kChunk = 1024;
const std::vector<std::int64_t> kSizes{3, 2500, 700, 5, 3 * kChunk};

class WalkOrder : public ::testing::Test {
 protected:
  ~WalkOrder() override { set_schedule({}); }

  /// The chunks whose parameters block 0, 1, ... 7 of all launches change.
  static std::vector<std::vector<Chunk>> updated(bool from_the_end, bool rows_on_device = false) {
    const TensorList before = contents_of<Adam>({}, kSizes);
    const StepScalars scalars{1.0, 0.0f, 0.0f};
    std::vector<std::vector<Chunk>> steps;
    for (std::uint32_t chosen = 0; chosen < 8; ++chosen) {
      TensorList list = before;
      float step = 1.0f;
      const OptimizerProblem<Adam> problem({}, list, {OptimizerCase<Adam>::group(9)}, &step);
      UpdateArgs<Adam> args = problem.update(&scalars);
      args.from_the_end = from_the_end;
      const std::vector<std::int64_t> chunk_offsets(kSizes.size() + 1);
      const RowsOnDevice kept(args.tensors, chunk_offsets.data(), kChunk);
      if (rows_on_device) args.tensors.device = kept.get();
      set_schedule({.selected = [chosen](std::uint32_t block) { return block == chosen; }});
      const Status status = fused_update_cuda(args, nullptr);
      EXPECT_TRUE(status.ok()) << status.what << ": " << last_fault();
      steps.push_back(changed(list, before));
    }
    return steps;
  }

 private:
  static std::vector<Chunk> changed(const TensorList& list, const TensorList& before) {
    std::vector<Chunk> result;
    for (std::size_t t = 0; t < list.size(); ++t) {
      for (std::int64_t i = 0; i < list[t].parts[kParam].numel(); i += kChunk) {
        if (list[t].parts[kParam].get(i) != before[t].parts[kParam].get(i)) {
          result.emplace_back(t, i / kChunk);
        }
      }
    }
    return result;
  }
};

TEST_F(WalkOrder, UpdateBeginsWithTheFirstTensor) {
  const std::vector<std::vector<Chunk>> expected{{{0, 0}, {3, 0}}, {{1, 0}}, {{1, 1}}, {{1, 2}},
                                                 {{2, 0}},         {{4, 0}}, {{4, 1}}, {{4, 2}}};
  EXPECT_EQ(updated(false), expected);
  EXPECT_EQ(updated(false, true), expected) << "with rows on the device";
}

// Small tensors come first all the same: they take long for their size.
TEST_F(WalkOrder, UpdateFromTheEndBeginsWithTheLastChunk) {
  const std::vector<std::vector<Chunk>> expected{{{0, 0}, {3, 0}}, {{4, 2}}, {{4, 1}}, {{4, 0}},
                                                 {{2, 0}},         {{1, 2}}, {{1, 1}}, {{1, 0}}};
  EXPECT_EQ(updated(true), expected);
}

// A span has one order of blocks, so small tensors come last.
TEST_F(WalkOrder, UpdateOfRowsOnTheDeviceFromTheEndBeginsWithTheLastBlock) {
  const std::vector<std::vector<Chunk>> expected{{{4, 2}}, {{4, 1}}, {{4, 0}}, {{2, 0}},
                                                 {{1, 2}}, {{1, 1}}, {{1, 0}}, {{0, 0}, {3, 0}}};
  EXPECT_EQ(updated(true, true), expected);
}

}  // namespace
}  // namespace cuda_on_cpu
