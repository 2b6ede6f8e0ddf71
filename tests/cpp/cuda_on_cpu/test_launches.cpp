// SPDX-License-Identifier: BSD-3-Clause
// How many launches and blocks lists of tensors take. No block runs, so tensors need no memory.
#include <gtest/gtest.h>

#include <algorithm>

#include "engine.h"
#include "kernels/cuda/rows_on_device.h"
#include "kernels/functors/adam.h"
#include "kernels/fused_optimizer.h"
#include "kernels/multi_tensor_l2_norm.h"
#include "kernels/multi_tensor_unscale.h"

namespace cuda_on_cpu {
namespace {

using namespace torchfuse::kernels;
using torchfuse::kernels::testing::Rows;
using torchfuse::kernels::testing::RowsOnDevice;

struct Launches {
  std::size_t count = 0;
  std::size_t blocks = 0;
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

TEST_F(ListLaunches, ListsWithoutElementsTakeNone) {
  for (const std::vector<std::int64_t>& sizes : {std::vector<std::int64_t>{}, {0, 0, 0}}) {
    EXPECT_EQ(norm(sizes, 5000).count, 0u);
    EXPECT_EQ(unscale(sizes).count, 0u);
    EXPECT_EQ(update(sizes).count, 0u);
  }
}

}  // namespace
}  // namespace cuda_on_cpu
