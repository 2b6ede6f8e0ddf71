// SPDX-License-Identifier: BSD-3-Clause
// The hand-over to the last block, again and again, on grids of all sizes and on the same memory: a
// partial that the last block does not see is one of a former launch, and the result is wrong.
//
// TORCHFUSE_REPETITIONS says how often; the GPU suite asks for 10,000.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

#include "batch_norm_problem.h"
#include "kernels/multi_tensor_l2_norm.h"
#include "norm_partials.h"
#include "prologue_step.h"

namespace torchfuse::kernels::testing {
namespace {

constexpr std::int64_t kMostSmall = 64;

unsigned repetitions() {
  const char* value = std::getenv("TORCHFUSE_REPETITIONS");
  if (value != nullptr) return static_cast<unsigned>(std::strtoul(value, nullptr, 10));
  return device_is_cpu() ? 20 : 200;
}

/// Cells of a chunk, each filled with a whole number of its own, so that every sum is exact.
class Cells {
 public:
  Cells(std::int64_t count, std::mt19937& random) : memory_(content(count, random)) {}

  std::int64_t count() const { return static_cast<std::int64_t>(numbers_.size()); }
  void* at(std::int64_t cell) const {
    return static_cast<float*>(memory_.data()) + cell * kNormChunk;
  }
  /// Of `numel` elements from the beginning of a cell on.
  double sum_of_squares(std::int64_t cell, std::int64_t numel) const {
    double sum = 0.0;
    for (; numel > 0; numel -= kNormChunk, ++cell) {
      const double number = numbers_[static_cast<std::size_t>(cell)];
      sum += number * number * static_cast<double>(std::min(numel, kNormChunk));
    }
    return sum;
  }

 private:
  Buffer content(std::int64_t count, std::mt19937& random) {
    Buffer buffer(DType::kFloat32, count * kNormChunk);
    for (std::int64_t i = 0; i < buffer.numel(); ++i) {
      if (i % kNormChunk == 0) numbers_.push_back(static_cast<double>(random() % 127 + 1));
      buffer.set(i, numbers_.back());
    }
    return buffer;
  }

  std::vector<double> numbers_;
  DeviceTensor memory_;
};

TEST(CudaStress, EveryNormHasThePartialsOfAllBlocks) {
  std::mt19937 random(1);
  // More blocks than a GPU holds at once.
  const Cells cells(device_is_cpu() ? 8 : 2048, random);
  const std::int64_t most_partials = cells.count() + kMostSmall;
  const auto partials = DeviceArray<NormPartial>::unwritten(most_partials);
  const DeviceBundles bundles(most_partials);
  const DeviceStep step({.sums_elsewhere = bundles.get().sums, .counts = {0.0f, 5.0f}});
  for (unsigned done = 0; done < repetitions(); ++done) {
    Rows rows;
    std::vector<std::int64_t> chunk_offsets{0};
    double sum = 0.0;
    const auto add = [&](std::int64_t cell, std::int64_t numel) {
      rows.add({.grad = cells.at(cell), .numel = numel});
      chunk_offsets.push_back(chunk_offsets.back() + num_norm_chunks(numel));
      sum += cells.sum_of_squares(cell, numel);
    };
    // Grids of all magnitudes; small tensors share blocks.
    const std::int64_t most = std::min(std::int64_t{1} << random() % 12, cells.count());
    const std::int64_t chunks = 1 + random() % most;
    add(random() % (cells.count() - chunks + 1), chunks * kNormChunk - random() % 100);
    for (std::int64_t i = random() % (kMostSmall + 1); i > 0; --i) {
      add(random() % cells.count(), 1 + random() % 700);
    }
    set_order({.seed = done, .resident_blocks = 1 + done % 8});
    PrologueArgs prologue = step.args();
    prologue.num_partials = num_norm_bundles(chunk_offsets.back());
    bool prologue_done = false;
    const DType dtype = DType::kFloat32;
    ASSERT_NO_FATAL_FAILURE(expect_ok(multi_tensor_l2_norm_cuda(
        {rows.table(dtype, dtype, dtype), chunk_offsets.data(), partials.data()}, bundles.get(),
        &prologue, &prologue_done, stream())));
    ASSERT_TRUE(prologue_done);
    const Outcome outcome = step.outcome();
    ASSERT_EQ(outcome.scalars.total_norm, static_cast<float>(std::sqrt(sum)))
        << "launch " << done << " of " << chunk_offsets.back() << " chunk_offsets";
    const auto grown = static_cast<float>(done + 1);
    ASSERT_EQ(outcome.counts, (std::vector{grown, 5.0f + grown}));
    bundles.expect_ready();
  }
}

/// Two batches of one shape that take turns in the same workspace, and the moments of each.
class Batches {
 public:
  Batches(const BatchNormShape& shape, int multiprocessors, std::mt19937& random)
      : shape_(shape),
        workspace_(shape, multiprocessors),
        packed_(DeviceArray<double>::unwritten(packed_moments_size(shape.channels))) {
    for (const double mean : {0.0, 3.0}) {
      inputs_.push_back(ChannelTensor::normal(shape, random, mean));
      expected_.push_back(moments(inputs_.back()));
    }
  }

  void expect_moments(std::size_t batch) const {
    ASSERT_EQ(moments(inputs_[batch]), expected_[batch]) << describe(shape_);
  }

 private:
  std::vector<double> moments(const ChannelTensor& x) const {
    BatchNormStatsArgs args;
    args.shape = shape_;
    args.input = x.input();
    args.packed = packed_.data();
    expect_ok(batch_norm_stats_cuda(args, workspace_.get(), stream()), workspace_);
    return packed_.to_host();
  }

  BatchNormShape shape_;
  Workspace workspace_;
  DeviceArray<double> packed_;
  std::vector<ChannelTensor> inputs_;
  std::vector<std::vector<double>> expected_;
};

// The first moments of each batch are right: test_batch_norm_stats.cpp.
TEST(CudaStress, EveryBatchHasThePartialsOfAllBlocks) {
  std::mt19937 random(2);
  std::vector<Batches> batches;
  for (const int multiprocessors : {1, 16, 132}) {
    const std::int64_t outer = device_is_cpu() ? 20 : 200 * multiprocessors;
    batches.emplace_back(rows(DType::kFloat32, 8 * outer, 65), multiprocessors, random);
    batches.emplace_back(planes(DType::kFloat16, outer, 3, 49), multiprocessors, random);
  }
  for (unsigned done = 0; done < repetitions(); ++done) {
    set_order({.seed = done, .resident_blocks = 1 + done % 8});
    ASSERT_NO_FATAL_FAILURE(batches[random() % batches.size()].expect_moments(random() % 2))
        << "launch " << done;
  }
}

}  // namespace
}  // namespace torchfuse::kernels::testing
