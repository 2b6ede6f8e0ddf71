// SPDX-License-Identifier: BSD-3-Clause
// The two tiers of K1's sums: every partial is in the sum of its bundle, whichever team comes last,
// and nobody adds before all are there. See Note [Bundles of partials].
#include <gtest/gtest.h>

#include <numeric>

#include "norm_partials.h"
#include "prologue_step.h"

namespace torchfuse::kernels {
namespace {

using namespace testing;

/// Tensors of these sizes with contents that round.
GradientList rounding_list(DType dtype, const std::vector<std::int64_t>& sizes) {
  std::mt19937 random(1);
  Buffer content(dtype, std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0}));
  content.fill_normal(random);
  GradientList list(dtype);
  list.add_packed(content, sizes, 1);
  return list;
}

/// As many tensors, in blocks of eight small ones and one of one tensor.
std::vector<std::int64_t> mixed_sizes(std::size_t tensors) {
  std::vector<std::int64_t> sizes(tensors, 3);
  for (std::size_t i = 0; i < tensors; i += 9) sizes[i] = 600;
  return sizes;
}

/// A list on the device, and a prologue that adds its sums.
class Bundled {
 public:
  explicit Bundled(const GradientList& list)
      : list_(list),
        rows_(list.device_rows()),
        chunk_offsets_(list.chunk_offsets()),
        partials_(DeviceArray<NormPartial>::unwritten(chunk_offsets_.back())),
        bundles_(chunk_offsets_.back()),
        step_({.sums_elsewhere = bundles_.get().sums,
               .num_sums_elsewhere = num_norm_bundles(chunk_offsets_.back()),
               .counts = {0.0f}}) {}

  /// The bits of its norm.
  float run() const {
    const PrologueArgs prologue = step_.args();
    bool done = false;
    const Status status =
        multi_tensor_l2_norm_cuda({list_.table(rows_), chunk_offsets_.data(), partials_.data()},
                                  bundles_.get(), &prologue, &done, stream());
    EXPECT_TRUE(status.ok()) << status.what;
    synchronize();
    EXPECT_TRUE(done);
    bundles_.expect_ready();
    EXPECT_TRUE(same_bits(bundles_.sums(), added_in_bundles(partials_.to_host())));
    return step_.outcome().scalars.total_norm;
  }

  std::vector<NormPartial> sums() const { return bundles_.sums(); }

 private:
  const GradientList& list_;
  Rows rows_;
  std::vector<std::int64_t> chunk_offsets_;
  DeviceArray<NormPartial> partials_;
  DeviceBundles bundles_;
  DeviceStep step_;
};

TEST(CudaNormBundles, SmallListsOfTwoBundlesHaveTheSameBitsInAnyOrderOfExecution) {
  for (const DType dtype : kEveryDType) {
    // 44 partials of 8 blocks.
    std::vector<std::int64_t> sizes(41, 5);
    sizes.insert(sizes.end(), {600, 700});
    const GradientList list = rounding_list(dtype, sizes);
    const Bundled bundled(list);
    set_order_for(dtype, 0, 1);
    const float expected = bundled.run();
    const std::vector<NormPartial> sums = bundled.sums();
    ASSERT_EQ(sums.size(), 2u);
    for (const std::uint32_t resident : {1, 2, 4, 8}) {
      set_order_for(dtype, 20 + resident, resident);
      EXPECT_EQ(bundled.run(), expected);
      EXPECT_TRUE(same_bits(bundled.sums(), sums));
    }
  }
}

TEST(CudaNormBundles, ListsOfEveryLengthAreCompleteAgainAndAgain) {
  for (const std::size_t tensors : {1, 31, 32, 33, 63, 64, 65, 300, 1025}) {
    const GradientList list = rounding_list(DType::kFloat32, mixed_sizes(tensors));
    const Bundled bundled(list);
    set_order({});
    const float expected = bundled.run();
    for (const std::uint64_t seed : {1, 2, 3}) {
      set_order({.seed = seed, .resident_blocks = static_cast<std::uint32_t>(1 + seed)});
      ASSERT_EQ(bundled.run(), expected) << tensors << " tensors, seed " << seed;
    }
  }
}

// Small tensors come first in every launch, so a bundle of neighbors has members in several.
TEST(CudaNormBundles, SpanTheLaunchesOfAList) {
  const GradientList list = rounding_list(DType::kFloat32, mixed_sizes(2500));
  const Bundled bundled(list);
  set_order({.seed = 5, .resident_blocks = 4});
  const float expected = bundled.run();
  double sum = 0.0;
  for (const GradientList::Row& row : list.rows()) {
    for (std::int64_t i = 0; i < row.numel; ++i) sum += list.get(row, i) * list.get(row, i);
  }
  EXPECT_NEAR(expected, std::sqrt(sum), 1e-6 * std::sqrt(sum));
  set_order({.seed = 6, .resident_blocks = 3});
  EXPECT_EQ(bundled.run(), expected);
}

}  // namespace
}  // namespace torchfuse::kernels
