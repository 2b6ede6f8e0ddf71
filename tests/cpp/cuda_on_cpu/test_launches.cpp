// SPDX-License-Identifier: BSD-3-Clause
// How many launches and blocks lists of tensors take: no block runs, so tensors need no memory. And
// in which order blocks walk through them.
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "engine.h"
#include "kernels/cuda/rows_on_device.h"
#include "kernels/fused_optimizer.h"
#include "kernels/multi_tensor_l2_norm.h"
#include "kernels/multi_tensor_unscale.h"
#include "kernels/optimizer_cases.h"
#include "kernels/optimizer_problem.h"

namespace cuda_on_cpu {
namespace {

using namespace torchfuse::kernels;
using namespace torchfuse::kernels::testing;

struct Launches {
  std::size_t count = 0;
  std::size_t blocks = 0;
  std::size_t argument_bytes = 0;  ///< of the largest launch
};

class ListLaunches : public ::testing::Test {
 protected:
  ListLaunches() {
    set_schedule({.selected = [](std::uint32_t) { return false; }});
  }
  ~ListLaunches() override { set_schedule({}); }

  /// Those of `enqueue`.
  template <class Enqueue>
  static Launches count(Enqueue enqueue) {
    clear_launches();
    const Status status = enqueue();
    EXPECT_TRUE(status.ok()) << status.what;
    Launches result;
    for (const LaunchShape& launch : launches()) {
      EXPECT_EQ(launch.block[0], 256u);
      ++result.count;
      result.blocks += launch.grid[0];
      result.argument_bytes = std::max(result.argument_bytes, launch.argument_bytes);
    }
    return result;
  }

  static Rows rows(const std::vector<std::int64_t>& sizes) {
    alignas(16) static float gradient = 0.0f;
    Rows rows;
    for (const std::int64_t numel : sizes) {
      TensorRow row;
      row.numel = numel;
      row.grad = &gradient;
      rows.add(row);
    }
    return rows;
  }

  static TensorTable table(const Rows& rows) {
    return rows.table(DType::kFloat32, DType::kFloat32, DType::kFloat32);
  }

  static Launches norm(const std::vector<std::int64_t>& sizes, std::size_t steps = 0,
                       std::size_t distance = 1, bool kept = false) {
    const Rows list = rows(sizes);
    const std::vector<std::int64_t> chunk_offsets(sizes.size() + 1);
    std::vector<float> memory(steps * distance);
    std::vector<float*> counts;
    for (std::size_t i = 0; i < steps; ++i) counts.push_back(memory.data() + i * distance);
    PrologueArgs prologue;
    prologue.steps = counts.data();
    prologue.num_steps = static_cast<std::int64_t>(steps);
    bool done = false;
    L2NormArgs args{table(list), chunk_offsets.data(), nullptr};
    const RowsOnDevice on_device(args.tensors, chunk_offsets.data(), args.chunk);
    if (kept) args.tensors.device = on_device.get();
    return count([&] { return multi_tensor_l2_norm_cuda(args, {}, &prologue, &done, nullptr); });
  }

  static Launches unscale(const std::vector<std::int64_t>& sizes) {
    const Rows list = rows(sizes);
    return count(
        [&] { return multi_tensor_unscale_cuda({table(list), nullptr, nullptr}, nullptr); });
  }

  static Launches update(const std::vector<std::int64_t>& sizes, bool kept = false) {
    const Rows list = rows(sizes);
    const std::vector<std::int64_t> chunk_offsets(sizes.size() + 1);
    const AdamParams group;
    UpdateArgs<Adam> args;
    args.tensors = table(list);
    const RowsOnDevice on_device(args.tensors, chunk_offsets.data(),
                                 update_chunk(args.tensors.total()));
    if (kept) args.tensors.device = on_device.get();
    args.groups = &group;
    args.num_groups = 1;
    return count([&] { return fused_update_cuda(args, nullptr); });
  }
};

TEST_F(ListLaunches, SmallTensorsShareBlocksWhereverTheyStandInTheList) {
  std::vector<std::int64_t> sizes;
  for (int i = 0; i < 160; ++i) sizes.insert(sizes.end(), {512, 513, 0});
  for (const Launches& launches : {norm(sizes), unscale(sizes), update(sizes)}) {
    EXPECT_EQ(launches.count, 1u);
    EXPECT_EQ(launches.blocks, 160u / 8 + 160u);
  }
}

TEST_F(ListLaunches, AStepTakesOneLaunchForThousandsOfCountsInARow) {
  EXPECT_EQ(norm({1}, 4096).count, 1u);
  EXPECT_EQ(norm({1}, 100'000).count, 2u);
  EXPECT_EQ(norm({1}, 256, 2).count, 1u);
  EXPECT_EQ(norm({1}, 4256, 2).count, 2u);
  EXPECT_EQ(norm({1}, 4257, 2).count, 3u);
}

TEST_F(ListLaunches, TenThousandSmallTensorsTakeThirtyFiveOrWithRowsOnTheDeviceEight) {
  const std::vector<std::int64_t> sizes(10'000, 64);
  EXPECT_EQ(norm(sizes, 10'000).count, 10u + 1u);
  EXPECT_EQ(update(sizes).count, 24u);
  EXPECT_EQ(norm(sizes, 10'000, 1, true).count, 3u + 1u);
  const Launches updates = update(sizes, true);
  EXPECT_EQ(updates.count, 4u);
  EXPECT_EQ(updates.blocks, 10'000u / 8);
  EXPECT_LE(unscale(sizes).count, 8u);
}

TEST_F(ListLaunches, RowsOnTheDeviceTakeTheBlocksOfRowsByValue) {
  std::vector<std::int64_t> sizes;
  for (int i = 0; i < 160; ++i) sizes.insert(sizes.end(), {512, 513, 0, 5000});
  EXPECT_EQ(norm(sizes, 0, 1, true).blocks, norm(sizes).blocks);
  EXPECT_EQ(update(sizes, true).count, 1u);
  EXPECT_EQ(update(sizes, true).blocks, 160u / 8 + 160u * (1 + 3));
}

TEST_F(ListLaunches, ChunksGrowWithTheList) {
  const auto chunk_of = [](const Launches& launches, std::int64_t numel) {
    return numel / static_cast<std::int64_t>(launches.blocks);
  };
  for (const int power : {20, 22, 23, 24, 26, 30}) {
    const std::int64_t numel = std::int64_t{1} << power;
    // Some 4,096 blocks, of one vector for each thread at least, and 16,384 elements at most.
    const std::int64_t expected = std::clamp(numel / 4096, std::int64_t{1024}, std::int64_t{16384});
    EXPECT_EQ(chunk_of(unscale({numel}), numel), expected) << power;
    EXPECT_EQ(chunk_of(update({numel}), numel), expected) << power;
    EXPECT_EQ(chunk_of(norm({numel}), numel), 16384) << power;
  }
}

TEST_F(ListLaunches, ShortListsPassFewArguments) {
  const std::vector<std::int64_t> sizes(48, 64);
  for (const Launches& launches : {norm(sizes, 48, 2), unscale(sizes), update(sizes)}) {
    EXPECT_EQ(launches.count, 1u);
    EXPECT_LE(launches.argument_bytes, 4096u);
  }
}

TEST_F(ListLaunches, ListsWithoutElementsTakeNone) {
  for (const std::vector<std::int64_t>& sizes : {std::vector<std::int64_t>{}, {0, 0, 0}}) {
    EXPECT_EQ(norm(sizes, 5000).count, 0u);
    EXPECT_EQ(unscale(sizes).count, 0u);
    EXPECT_EQ(update(sizes).count, 0u);
  }
}

// --- In which order an update walks through its elements: blocks run one by one ------------------

/// A tensor and a chunk of it.
using Chunk = std::pair<std::size_t, std::int64_t>;

/// Elements that a block handles in lists as short as these.
constexpr std::int64_t kChunk = 1024;
const std::vector<std::int64_t> kSizes{3, 2500, 700, 5, 3 * kChunk};

class WalkOrder : public ::testing::Test {
 protected:
  ~WalkOrder() override { set_schedule({}); }

  /// The chunks whose parameters block 0, 1, ... 7 of all launches change. `sizes` may continue
  /// with empty tensors.
  static std::vector<std::vector<Chunk>> updated(bool from_the_end, bool rows_on_device = false,
                                                 const std::vector<std::int64_t>& sizes = kSizes) {
    const TensorList before = contents_of<Adam>({}, sizes);
    const StepScalars scalars{1.0, 0.0f, 0.0f};
    std::vector<std::vector<Chunk>> steps;
    for (std::uint32_t chosen = 0; chosen < 8; ++chosen) {
      TensorList list = before;
      float step = 1.0f;
      const OptimizerProblem<Adam> problem({}, list, {OptimizerCase<Adam>::group(9)}, &step);
      UpdateArgs<Adam> args = problem.update(&scalars);
      args.from_the_end = from_the_end;
      const std::vector<std::int64_t> chunk_offsets(sizes.size() + 1);
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

/// More than a short launch has room for.
std::vector<std::int64_t> many_sizes() {
  std::vector<std::int64_t> sizes = kSizes;
  sizes.resize(100);
  return sizes;
}

TEST_F(WalkOrder, UpdateBeginsWithTheFirstTensor) {
  const std::vector<std::vector<Chunk>> expected{{{0, 0}, {3, 0}}, {{1, 0}}, {{1, 1}}, {{1, 2}},
                                                 {{2, 0}},         {{4, 0}}, {{4, 1}}, {{4, 2}}};
  EXPECT_EQ(updated(false), expected);
  EXPECT_EQ(updated(false, false, many_sizes()), expected);
  EXPECT_EQ(updated(false, true), expected) << "with rows on the device";
}

// Small tensors come first all the same: they take long for their size.
TEST_F(WalkOrder, UpdateFromTheEndBeginsWithTheLastChunk) {
  const std::vector<std::vector<Chunk>> expected{{{0, 0}, {3, 0}}, {{4, 2}}, {{4, 1}}, {{4, 0}},
                                                 {{2, 0}},         {{1, 2}}, {{1, 1}}, {{1, 0}}};
  EXPECT_EQ(updated(true), expected);
  EXPECT_EQ(updated(true, false, many_sizes()), expected);
}

// A span has one order of blocks, so small tensors come last.
TEST_F(WalkOrder, UpdateOfRowsOnTheDeviceFromTheEndBeginsWithTheLastBlock) {
  const std::vector<std::vector<Chunk>> expected{{{4, 2}}, {{4, 1}}, {{4, 0}}, {{2, 0}},
                                                 {{1, 2}}, {{1, 1}}, {{1, 0}}, {{0, 0}, {3, 0}}};
  EXPECT_EQ(updated(true, true), expected);
}

}  // namespace
}  // namespace cuda_on_cpu
