// SPDX-License-Identifier: BSD-3-Clause
// The hand-overs of K1. Every partial is in the sum of its bundle, whichever team comes last, and
// nobody adds before all are there: see Note [Bundles of partials]. The prologue in the last block
// runs once, after everything else, and leaves the arrival counters ready for the next launch.
#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <optional>

#include "kernels/multi_tensor_l2_norm.h"
#include "norm_partials.h"
#include "prologue_step.h"

namespace torchfuse::kernels {
namespace {

using namespace testing;

/// K1 with a prologue over its partials, on memory that lasts for several launches.
class NormStep {
 public:
  NormStep(const GradientList& list, Step step, bool rows_on_device = false)
      : list_(list),
        rows_(list.device_rows()),
        chunk_offsets_(list.chunk_offsets()),
        partials_(DeviceArray<NormPartial>::unwritten(chunk_offsets_.back())),
        bundles_(chunk_offsets_.back()),
        device_(with_sums_of(std::move(step), bundles_, chunk_offsets_.back())) {
    if (rows_on_device) kept_.emplace(list.table(rows_), chunk_offsets_.data(), kNormChunk);
  }

  Status launch(bool* done) const {
    L2NormArgs args{list_.table(rows_), chunk_offsets_.data(), partials_.data()};
    if (kept_) args.tensors.device = kept_->get();
    const PrologueArgs prologue = device_.args();
    return multi_tensor_l2_norm_cuda(args, bundles_.get(), &prologue, done, stream());
  }

  void run() const {
    bool done = false;
    ASSERT_NO_FATAL_FAILURE(expect_ok(launch(&done)));
    EXPECT_TRUE(done);
    bundles_.expect_ready();
    EXPECT_TRUE(same_bits(sums(), added_in_bundles(partials_.to_host())));
  }
  float norm() const {
    run();
    return outcome().scalars.total_norm;
  }

  void expect_single_accesses(unsigned launches) const {
    device_.expect_single_accesses(launches);
    partials_.expect_accesses(launches, launches);
    bundles_.expect_accesses(launches, launches);
  }

  Outcome outcome() const { return device_.outcome(); }
  std::vector<NormPartial> sums() const { return bundles_.sums(); }
  const DeviceBundles& bundles() const { return bundles_; }

 private:
  static Step with_sums_of(Step step, const DeviceBundles& bundles, std::int64_t partials) {
    step.partials.clear();
    step.sums_elsewhere = bundles.get().sums;
    step.num_sums_elsewhere = num_norm_bundles(partials);
    return step;
  }

  const GradientList& list_;
  Rows rows_;
  std::vector<std::int64_t> chunk_offsets_;
  DeviceArray<NormPartial> partials_;
  DeviceBundles bundles_;
  DeviceStep device_;
  std::optional<RowsOnDevice> kept_;
};

/// Tensors of whole numbers for `blocks` blocks, two of them of several warps.
GradientList whole_list(DType dtype, int blocks) {
  std::mt19937 random(1);
  GradientList list(dtype);
  for (const std::int64_t numel : {3, 0, 500, 1, 7, 9, 11, 13, 15, 17}) {
    list.add(whole_numbers(dtype, numel, random), 1);
  }
  for (int block = 2; block < blocks; ++block) {
    list.add(whole_numbers(dtype, 600 + 100 * block, random), 1);
  }
  return list;
}

double exact_norm(const GradientList& list) {
  double sum = 0.0;
  for (const GradientList::Row& row : list.rows()) {
    for (std::int64_t i = 0; i < row.numel; ++i) sum += list.get(row, i) * list.get(row, i);
  }
  return std::sqrt(sum);
}

TEST(CudaLastBlock, SmallListsRunThePrologueOnceInEveryLaunch) {
  for (const DType dtype : kEveryDType) {
    const GradientList list = whole_list(dtype, 8);
    for (const std::uint32_t resident : {1, 2, 4, 8}) {
      const NormStep step(list, {.counts = {0.0f, 41.0f, 7.0f}});
      for (const unsigned launches : {1, 2}) {
        set_order_for(dtype, 10 * resident + launches, resident);
        step.run();
        step.expect_single_accesses(launches);
        const auto grown = static_cast<float>(launches);
        const Outcome outcome = step.outcome();
        EXPECT_EQ(outcome.scalars.total_norm, static_cast<float>(exact_norm(list)));
        EXPECT_EQ(outcome.scalars.grad_coef, 1.0);
        EXPECT_EQ(outcome.scalars.skip, 0.0f);
        EXPECT_EQ(outcome.counts, (std::vector{grown, 41.0f + grown, 7.0f + grown}));
      }
    }
  }
}

TEST(CudaLastBlock, RowsOnTheDeviceRunThePrologueOnceAfterTheirLastLaunch) {
  std::mt19937 random(3);
  const std::vector<std::int64_t> sizes(9000, 5);
  GradientList list(DType::kFloat32);
  list.add_packed(whole_numbers(DType::kFloat32, 5 * 9000, random), sizes);
  const NormStep step(list, {.counts = {0.0f, 41.0f}}, true);
  for (const unsigned launches : {1, 2}) {
    set_order_for(DType::kFloat32, launches, 4);
    step.run();
    step.expect_single_accesses(launches);
    EXPECT_EQ(step.outcome().scalars.total_norm, static_cast<float>(exact_norm(list)));
    EXPECT_EQ(step.outcome().counts,
              (std::vector{static_cast<float>(launches), 41.0f + static_cast<float>(launches)}));
  }
}

TEST(CudaLastBlock, SmallListsAreSkippedForAnElementThatIsNotFinite) {
  for (const DType dtype : kEveryDType) {
    for (const std::int64_t at : {0, 599}) {
      Buffer content(dtype, 600);
      content.set(at, std::numeric_limits<double>::infinity());
      GradientList list = whole_list(dtype, 4);
      list.add(content, 1);
      for (const bool check : {true, false}) {
        const NormStep step(list, {.found_inf = 0.0f, .check = check, .counts = {3.0f}});
        for (int launch = 0; launch < 2; ++launch) {
          set_order_for(dtype, static_cast<std::uint64_t>(1 + at + launch), 4);
          step.run();
        }
        const Outcome outcome = step.outcome();
        EXPECT_EQ(outcome.scalars.skip, check ? 1.0f : 0.0f);
        EXPECT_EQ(outcome.found_inf, check ? 1.0f : 0.0f);
        EXPECT_EQ(outcome.counts[0], check ? 3.0f : 5.0f);
      }
    }
  }
}

TEST(CudaLastBlock, GivesTheBitsOfThePrologueKernel) {
  std::mt19937 random(2);
  for (const DType dtype : kEveryDType) {
    std::vector<std::int64_t> sizes(300, 5);
    sizes.insert(sizes.end(), {600, 700, 3 * kNormChunk + 17});
    Buffer content(dtype, 300 * 5 + 600 + 700 + 3 * kNormChunk + 17);
    content.fill_normal(random);
    GradientList list(dtype);
    list.add_packed(content, sizes, 1);
    set_order_for(dtype, 1, 4);
    Step step{.grad_scale = 1024.0f, .found_inf = 0.0f, .check = true, .counts = {1.0f, 2.0f}};
    step.partials = added_in_bundles(partials_of(list));
    for (const double max_norm : {-1.0, 0.001}) {
      step.max_grad_norm = max_norm;
      const NormStep behind(list, step);
      behind.run();
      expect_same_outcome(behind.outcome(), prologue_on_device(step));
    }
  }
}

TEST(CudaLastBlock, StepsOfAnyNumberGrowOnce) {
  const GradientList list = whole_list(DType::kFloat32, 3);
  // K1's launch takes 108 or 256 anywhere or 4,096 in a row, those that follow 4,000 anywhere.
  for (const bool scattered : {false, true}) {
    for (const std::size_t count :
         {0, 1, 2, 108, 109, 255, 256, 257, 1025, 4095, 4096, 4097, 4257, 9100}) {
      for (const float flag : {0.0f, 2.0f}) {
        set_order({.seed = count, .resident_blocks = 4});
        const NormStep step(
            list,
            {.found_inf = flag, .counts = std::vector<float>(count, 9.0f), .scattered = scattered});
        step.run();
        step.expect_single_accesses(1);
        ASSERT_EQ(step.outcome().counts, std::vector<float>(count, flag == 0.0f ? 10.0f : 9.0f));
      }
    }
  }
}

TEST(CudaLastBlock, ComesAfterAllLaunchesOfAList) {
  std::mt19937 random(3);
  std::vector<std::size_t> lengths{1, 8, 9, 2190};
  // The end of a launch, which takes some 1,090 tensors, is among these.
  for (std::size_t length = 1088; length <= 1096; ++length) lengths.push_back(length);
  for (const std::size_t length : lengths) {
    GradientList list(DType::kFloat32);
    list.add_packed(whole_numbers(DType::kFloat32, static_cast<std::int64_t>(length), random),
                    std::vector<std::int64_t>(length, 1), 1);
    set_order({.seed = length, .resident_blocks = 4});
    const NormStep step(list, {.counts = std::vector<float>(length, 0.0f)});
    step.run();
    step.expect_single_accesses(1);
    EXPECT_EQ(step.outcome().scalars.total_norm, static_cast<float>(exact_norm(list))) << length;
    EXPECT_EQ(step.outcome().counts, std::vector<float>(length, 1.0f)) << length;
  }
}

TEST(CudaLastBlock, DoesNotRunForAListWithoutElements) {
  GradientList list(DType::kFloat32);
  for (const int tensors : {0, 20}) {
    while (list.rows().size() < static_cast<std::size_t>(tensors)) {
      list.add(Buffer(DType::kFloat32, 0));
    }
    const NormStep step(list, {.found_inf = 0.0f, .counts = {3.0f}});
    bool done = true;
    expect_ok(step.launch(&done));
    EXPECT_FALSE(done);
    step.bundles().expect_ready();
    EXPECT_TRUE(std::isnan(step.outcome().scalars.grad_coef)) << "as fresh memory is";
    EXPECT_EQ(step.outcome().counts[0], 3.0f);
  }
}

/// K1 on tensors of these sizes, without memory: for launches that are refused.
Status refused(const std::vector<std::int64_t>& sizes, DType dtype, const DeviceStep& step) {
  Rows rows;
  std::vector<std::int64_t> chunk_offsets{0};
  for (const std::int64_t numel : sizes) {
    rows.add({.grad = nullptr, .numel = numel});
    chunk_offsets.push_back(chunk_offsets.back() + num_norm_chunks(numel));
  }
  const PrologueArgs prologue = step.args();
  bool done = false;
  const Status status =
      multi_tensor_l2_norm_cuda({rows.table(dtype, dtype, dtype), chunk_offsets.data(), nullptr},
                                {}, &prologue, &done, stream());
  synchronize();
  return status;
}

TEST(CudaLastBlock, ReportsALaunchThatTheDeviceRefusesAndStopsThere) {
  constexpr std::int64_t kTooLarge = std::int64_t{1} << 45;  // 2^31 blocks
  set_order({});
  const DeviceStep step({.counts = std::vector<float>(2000, 3.0f)});
  std::vector<std::int64_t> first_of_many(2000, 600);
  first_of_many[0] = kTooLarge;
  for (const auto& sizes : {std::vector<std::int64_t>{kTooLarge}, first_of_many}) {
    expect_refused(refused(sizes, DType::kFloat32, step), "launch of multi_tensor_l2_norm_kernel");
  }
  expect_refused(refused({100}, static_cast<DType>(9), step),
                 "gradient dtype of multi_tensor_l2_norm");
  EXPECT_EQ(step.outcome().counts, std::vector<float>(2000, 3.0f));
  // The error is reported once and does not stick to the next launch.
  const GradientList list = whole_list(DType::kFloat32, 3);
  NormStep(list, {}).run();
}

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

TEST(CudaNormBundles, SmallListsOfTwoBundlesHaveTheSameBitsInAnyOrderOfExecution) {
  for (const DType dtype : kEveryDType) {
    // 44 partials of 8 blocks.
    std::vector<std::int64_t> sizes(41, 5);
    sizes.insert(sizes.end(), {600, 700});
    const GradientList list = rounding_list(dtype, sizes);
    const NormStep step(list, {.counts = {0.0f}});
    set_order_for(dtype, 0, 1);
    const float expected = step.norm();
    const std::vector<NormPartial> sums = step.sums();
    ASSERT_EQ(sums.size(), 2u);
    for (const std::uint32_t resident : {1, 2, 4, 8}) {
      set_order_for(dtype, 20 + resident, resident);
      EXPECT_EQ(step.norm(), expected);
      EXPECT_TRUE(same_bits(step.sums(), sums));
    }
  }
}

TEST(CudaNormBundles, ListsOfEveryLengthAreCompleteAgainAndAgain) {
  // Small tensors come first in every launch, so of the last list a bundle of neighbors has members
  // in several.
  for (const std::size_t tensors : {1, 31, 32, 33, 63, 64, 65, 300, 1025, 2500}) {
    const GradientList list = rounding_list(DType::kFloat32, mixed_sizes(tensors));
    const NormStep step(list, {.counts = {0.0f}});
    set_order({});
    const float expected = step.norm();
    EXPECT_NEAR(expected, exact_norm(list), 1e-6 * exact_norm(list));
    for (const std::uint64_t seed : {1, 2, 3}) {
      set_order({.seed = seed, .resident_blocks = static_cast<std::uint32_t>(1 + seed)});
      ASSERT_EQ(step.norm(), expected) << tensors << " tensors, seed " << seed;
    }
  }
}

}  // namespace
}  // namespace torchfuse::kernels
