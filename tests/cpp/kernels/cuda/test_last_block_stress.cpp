// SPDX-License-Identifier: BSD-3-Clause
// The hand-over to the last block, again and again, on grids of all sizes and on the same memory: a
// partial that the last block does not see is one of a former launch, and the norm is wrong.
//
// TORCHFUSE_REPETITIONS says how often; the GPU suite asks for 10,000.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>

#include "kernels/multi_tensor_l2_norm.h"
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

TEST(CudaLastBlockStress, EveryLaunchSeesThePartialsOfAllItsBlocks) {
  std::mt19937 random(1);
  // More blocks than a GPU holds at once.
  const Cells cells(device_is_cpu() ? 8 : 2048, random);
  const DeviceStep step({.unwritten_partials = cells.count() + kMostSmall, .counts = {0.0f, 5.0f}});
  const DeviceArray<std::uint32_t> arrivals({0});
  for (unsigned done = 0; done < repetitions(); ++done) {
    Rows rows;
    std::vector<std::int64_t> slots{0};
    double sum = 0.0;
    const auto add = [&](std::int64_t cell, std::int64_t numel) {
      rows.add({.grad = cells.at(cell), .numel = numel});
      slots.push_back(slots.back() + num_norm_chunks(numel));
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
    prologue.num_partials = slots.back();
    bool prologue_done = false;
    const DType dtype = DType::kFloat32;
    const Status status =
        multi_tensor_l2_norm_cuda({rows.table(dtype, dtype, dtype), slots.data(), step.partials()},
                                  &prologue, arrivals.data(), &prologue_done, stream());
    ASSERT_TRUE(status.ok()) << status.what;
    synchronize();
    ASSERT_TRUE(prologue_done);
    const Outcome outcome = step.outcome();
    ASSERT_EQ(outcome.scalars.total_norm, static_cast<float>(std::sqrt(sum)))
        << "launch " << done << " of " << slots.back() << " slots";
    const auto grown = static_cast<float>(done + 1);
    ASSERT_EQ(outcome.counts, (std::vector{grown, 5.0f + grown}));
    ASSERT_EQ(arrivals.to_host()[0], 0u);
  }
}

}  // namespace
}  // namespace torchfuse::kernels::testing
