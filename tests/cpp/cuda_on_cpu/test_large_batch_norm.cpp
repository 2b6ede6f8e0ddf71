// SPDX-License-Identifier: BSD-3-Clause
// Batch normalization of tensors of more than 2^32 elements: the few blocks that stand where
// indices or byte offsets of 32 bits, signed or unsigned, would wrap.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "engine.h"
#include "kernels/batch_norm.h"
#include "sparse_memory.h"

namespace cuda_on_cpu {
namespace {

using namespace torchfuse::kernels;
using torchfuse::kernels::testing::Buffer;

constexpr std::int64_t kChannels = 64;  ///< of a row
constexpr std::int64_t kChunk = 16384;
constexpr std::int64_t kNumel = (std::int64_t{1} << 32) + 2 * kChunk + kChannels;
/// So many that every thread has its least number of windows: whole fractions of a chunk.
constexpr int kMultiprocessors = 1 << 22;

/// Where the chunks begin that exist: the first, the last, and those around borders.
std::set<std::int64_t> chunks(DType dtype) {
  std::set<std::int64_t> result{0, kNumel / kChunk * kChunk};
  for (const int power : {31, 32}) {
    for (const std::size_t bytes : {std::size_t{1}, size_of(dtype)}) {
      const std::int64_t border = (std::int64_t{1} << power) / static_cast<std::int64_t>(bytes);
      result.insert({border - kChunk, border});
    }
  }
  return result;
}

std::int64_t elements_from(std::int64_t first) { return std::min(kChunk, kNumel - first); }

/// Numbers that tell elements and chunks apart; they and their doubles are exact in every format.
Buffer content_of(DType dtype, std::int64_t first, double factor) {
  Buffer content(dtype, elements_from(first));
  for (std::int64_t i = 0; i < content.numel(); ++i) {
    content.set(i, factor * static_cast<double>((first / kChunk + i) % 97 + 1));
  }
  return content;
}

class LargeBatchNorm : public ::testing::Test {
 protected:
  ~LargeBatchNorm() override { set_schedule({}); }

  /// y = x + x, with statistics that change nothing.
  static void expect_doubled(const BatchNormShape& shape, std::int64_t block_elements) {
    const SparseTensor x(shape.dtype, kNumel, 0);
    const SparseTensor y(shape.dtype, kNumel, 0);
    std::set<std::uint32_t> blocks;
    for (const std::int64_t first : chunks(shape.dtype)) {
      x.write(first, content_of(shape.dtype, first, 1.0));
      y.write(first, content_of(shape.dtype, first, 0.0));
      // Channels last, blocks share rows, but not those of two chunks.
      for (std::int64_t i = 0; i < kChunk; i += block_elements) {
        blocks.insert(static_cast<std::uint32_t>((first + i) / block_elements));
      }
    }
    Schedule schedule;
    schedule.seed = 1;
    schedule.flush_denormals = shape.dtype != DType::kFloat64;
    schedule.selected = [&](std::uint32_t block) { return blocks.contains(block); };
    set_schedule(schedule);
    std::vector<double> saved(static_cast<std::size_t>(2 * shape.channels + 1));
    BatchNormFinishArgs finish;
    finish.channels = shape.channels;
    finish.eps = 0.0;
    finish.saved = saved.data();
    BatchNormElemtArgs args;
    args.shape = shape;
    args.input = {x.data(), shape.channels * shape.inner, shape.inner};
    args.residual = args.input;
    args.output = y.data();
    const Status status =
        batch_norm_elemt_cuda(args, finish, {nullptr, nullptr, kMultiprocessors}, nullptr);
    ASSERT_TRUE(status.ok()) << status.what << ": " << last_fault();
    for (const std::int64_t first : chunks(shape.dtype)) {
      EXPECT_TRUE(y.read(first, elements_from(first)) == content_of(shape.dtype, first, 2.0))
          << "from element " << first << " of dtype " << int(shape.dtype);
    }
  }
};

constexpr DType kEveryDType[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                 DType::kFloat64};

TEST_F(LargeBatchNorm, PlaneOfMoreThan32Bits) {
  for (const DType dtype : kEveryDType) {
    // 256 threads, four windows of 16 bytes each.
    expect_doubled({1, 1, kNumel, false, dtype},
                   256 * 4 * 16 / static_cast<std::int64_t>(size_of(dtype)));
  }
}

TEST_F(LargeBatchNorm, RowsBeyond32Bits) {
  for (const DType dtype : kEveryDType) {
    expect_doubled({kNumel / kChannels, kChannels, 1, true, dtype},
                   256 * 4 * 16 / static_cast<std::int64_t>(size_of(dtype)));
  }
}

}  // namespace
}  // namespace cuda_on_cpu
