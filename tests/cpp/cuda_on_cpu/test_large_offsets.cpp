// SPDX-License-Identifier: BSD-3-Clause
// Tensors of more than 2^32 elements: the few blocks that stand where indices or byte offsets of 32
// bits, signed or unsigned, would wrap.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "engine.h"
#include "kernels/batch_norm.h"
#include "kernels/functors/adam.h"
#include "kernels/fused_optimizer.h"
#include "kernels/multi_tensor_l2_norm.h"
#include "kernels/multi_tensor_unscale.h"
#include "sparse_memory.h"

namespace cuda_on_cpu {
namespace {

using namespace torchfuse::kernels;
using torchfuse::kernels::testing::Buffer;
using torchfuse::kernels::testing::kEveryDType;
using torchfuse::kernels::testing::Rows;

/// Elements that one block handles in long lists.
constexpr std::int64_t kChunk = 16384;
constexpr std::int64_t kTail = 64;  ///< behind the last whole chunk, and the channels of a row
constexpr std::int64_t kNumel = (std::int64_t{1} << 32) + 2 * kChunk + kTail;
constexpr std::uint32_t kBlocks = (kNumel + kChunk - 1) / kChunk;

/// Elements [first, first + count) of a tensor: whole chunks.
struct Part {
  std::int64_t first;
  std::int64_t count;
};

/// The first chunk, the last two, and those on both sides of 2^31 and 2^32, in elements and bytes.
std::vector<Part> parts(DType dtype) {
  std::set<std::int64_t> borders;
  for (const int power : {31, 32}) {
    const std::int64_t border = std::int64_t{1} << power;
    borders.insert({border, border / static_cast<std::int64_t>(size_of(dtype))});
  }
  std::vector<Part> result{{0, kChunk}};
  for (const std::int64_t border : borders) result.push_back({border - kChunk, 2 * kChunk});
  result.push_back({kNumel - kTail - kChunk, kChunk + kTail});
  return result;
}

/// Numbers that tell elements and parts apart, exact in every format.
Buffer content_of(DType dtype, std::int64_t count, std::size_t part) {
  Buffer content(dtype, count);
  for (std::int64_t i = 0; i < count; ++i) {
    content.set(i, static_cast<double>(i % 97 + 1) + 8.0 * static_cast<double>(part));
  }
  return content;
}

/// A tensor that exists in its parts only.
std::unique_ptr<SparseTensor> make_tensor(DType dtype, std::int64_t offset) {
  auto tensor = std::make_unique<SparseTensor>(dtype, kNumel, offset);
  const auto all = parts(dtype);
  for (std::size_t part = 0; part < all.size(); ++part) {
    tensor->write(all[part].first, content_of(dtype, all[part].count, part));
  }
  return tensor;
}

class LargeOffsets : public ::testing::Test {
 protected:
  ~LargeOffsets() override { set_schedule({}); }

  /// Launches to come run the blocks of the parts alone, `before` blocks into their grids, and
  /// those before them.
  static void select(DType dtype, std::uint32_t before, std::int64_t block_elements = kChunk) {
    std::set<std::uint32_t> blocks;
    for (std::uint32_t block = 0; block < before; ++block) blocks.insert(block);
    for (const Part& part : parts(dtype)) {
      for (std::int64_t done = 0; done < part.count; done += block_elements) {
        blocks.insert(before + static_cast<std::uint32_t>((part.first + done) / block_elements));
      }
    }
    Schedule schedule;
    schedule.seed = 1;
    schedule.flush_denormals = dtype != DType::kFloat64;
    schedule.selected = [blocks](std::uint32_t block) { return blocks.contains(block); };
    set_schedule(schedule);
    clear_launches();
  }

  static void expect_launched(const Status& status, std::uint32_t blocks) {
    EXPECT_TRUE(status.ok()) << status.what << ": " << last_fault();
    ASSERT_EQ(launches().size(), 1u);
    EXPECT_EQ(launches()[0].grid[0], blocks);
  }
};

void expect_partial(const NormPartial& partial, double sum) {
  EXPECT_EQ(partial.small, sum);
  EXPECT_EQ(partial.big, 0.0);
  EXPECT_EQ(partial.nonfinite, 0u);
}

double sum_of_squares(const Buffer& content, std::int64_t first) {
  double sum = 0.0;
  for (std::int64_t i = first; i < std::min(first + kChunk, content.numel()); ++i) {
    sum += content.get(i) * content.get(i);
  }
  return sum;
}

TEST_F(LargeOffsets, NormWritesTheSlotsOfTheseChunks) {
  for (const DType dtype : kEveryDType) {
    for (const std::int64_t offset : {0, 1}) {
      const auto tensor = make_tensor(dtype, offset);
      // A tensor of one block comes first, so that chunk and block have different numbers.
      Buffer other = content_of(dtype, 600, 0);
      Rows rows;
      rows.add({.grad = other.data(), .numel = 600});
      rows.add({.grad = tensor->data(), .numel = kNumel});
      const std::int64_t chunk_offsets[] = {0, 1, 1 + kBlocks};
      const NormPartial fresh{-1.0, -1.0, 77};
      std::vector<NormPartial> partials(1 + kBlocks, fresh);
      select(dtype, 1);
      std::vector<NormPartial> sums(num_norm_bundles(1 + kBlocks));
      std::vector<std::uint32_t> arrivals(num_norm_arrivals(1 + kBlocks));
      bool done = false;
      const Status status = multi_tensor_l2_norm_cuda(
          {rows.table(dtype, dtype, dtype), chunk_offsets, partials.data()},
          {sums.data(), arrivals.data()}, nullptr, &done, nullptr);
      expect_launched(status, 1 + kBlocks);
      expect_partial(partials[0], sum_of_squares(other, 0));
      partials[0] = fresh;
      const auto all = parts(dtype);
      for (std::size_t part = 0; part < all.size(); ++part) {
        const Buffer content = content_of(dtype, all[part].count, part);
        for (std::int64_t first = 0; first < content.numel(); first += kChunk) {
          const auto chunk = static_cast<std::size_t>(1 + (all[part].first + first) / kChunk);
          expect_partial(partials[chunk], sum_of_squares(content, first));
          partials[chunk] = fresh;
        }
      }
      EXPECT_TRUE(std::all_of(partials.begin(), partials.end(), [&](const NormPartial& partial) {
        return std::memcmp(&partial, &fresh, sizeof fresh) == 0;
      })) << "the partial of another chunk was written";
    }
  }
}

TEST_F(LargeOffsets, NormWritesSlotsBeyond32Bits) {
  constexpr std::int64_t kFirstChunk = (std::int64_t{1} << 32) + 5;
  const SparseMemory memory((kFirstChunk + 3) * sizeof(NormPartial));
  memory.open((kFirstChunk - 1) * sizeof(NormPartial), (kFirstChunk + 3) * sizeof(NormPartial));
  auto* const partials = reinterpret_cast<NormPartial*>(memory.data());
  Buffer content = content_of(DType::kFloat32, kChunk + 5, 0);
  Rows rows;
  rows.add({.grad = content.data(), .numel = content.numel()});
  const std::int64_t chunk_offsets[] = {kFirstChunk, kFirstChunk + 2};
  // All but these two of their bundle have arrived.
  constexpr std::int64_t kBundle = kFirstChunk / kNormBundle;
  const SparseMemory sum_memory((kBundle + 1) * sizeof(NormPartial));
  sum_memory.open(kBundle * sizeof(NormPartial), (kBundle + 1) * sizeof(NormPartial));
  auto* const sums = reinterpret_cast<NormPartial*>(sum_memory.data());
  const SparseMemory arrival_memory((kBundle + 2) * sizeof(std::uint32_t));
  arrival_memory.open(0, sizeof(std::uint32_t));
  arrival_memory.open((kBundle + 1) * sizeof(std::uint32_t), (kBundle + 2) * sizeof(std::uint32_t));
  auto* const arrivals = reinterpret_cast<std::uint32_t*>(arrival_memory.data());
  arrivals[1 + kBundle] = kFirstChunk % kNormBundle;
  bool done = false;
  const Status status = multi_tensor_l2_norm_cuda(
      {rows.table(DType::kFloat32, DType::kFloat32, DType::kFloat32), chunk_offsets, partials},
      {sums, arrivals}, nullptr, &done, nullptr);
  EXPECT_TRUE(status.ok()) << status.what << ": " << last_fault();
  expect_partial(sums[kBundle], sum_of_squares(content, 0) + sum_of_squares(content, kChunk));
  EXPECT_EQ(arrivals[0], 1u);
  EXPECT_EQ(arrivals[1 + kBundle], 0u);
  expect_partial(partials[kFirstChunk - 1], 0.0);
  expect_partial(partials[kFirstChunk], sum_of_squares(content, 0));
  expect_partial(partials[kFirstChunk + 1], sum_of_squares(content, kChunk));
  expect_partial(partials[kFirstChunk + 2], 0.0);
}

TEST_F(LargeOffsets, UnscaleScalesTheElementsOfTheseChunks) {
  for (const DType dtype : kEveryDType) {
    for (const std::int64_t offset : {0, 1}) {
      const auto tensor = make_tensor(dtype, offset);
      Rows rows;
      rows.add({.grad = tensor->data(), .numel = kNumel});
      const float inv_scale = 0.5f;
      float found_inf = 0.0f;
      select(dtype, 0);
      const Status status = multi_tensor_unscale_cuda(
          {rows.table(dtype, dtype, dtype), &inv_scale, &found_inf}, nullptr);
      expect_launched(status, kBlocks);
      EXPECT_EQ(found_inf, 0.0f);
      const auto all = parts(dtype);
      for (std::size_t part = 0; part < all.size(); ++part) {
        Buffer expected = content_of(dtype, all[part].count, part);
        for (std::int64_t i = 0; i < expected.numel(); ++i) expected.set(i, expected.get(i) / 2);
        EXPECT_TRUE(tensor->read(all[part].first, all[part].count) == expected)
            << "from element " << all[part].first << " of dtype " << int(dtype);
      }
    }
  }
}

AdamParams adam_params() {
  AdamParams params;
  params.lr.value = 1e-2;
  params.beta1.value = 0.9;
  params.beta2.value = 0.999;
  params.eps.value = 1e-8;
  params.weight_decay.value = 0.1;
  return params;
}

UpdateArgs<Adam> update_args(const Rows& rows, DType dtype, const AdamParams& group,
                             const StepScalars& scalars) {
  UpdateArgs<Adam> args;
  args.tensors = rows.table(dtype, dtype, dtype);
  args.groups = &group;
  args.num_groups = 1;
  args.scalars = &scalars;
  return args;
}

/// What the CPU makes of four operands with the same content: parameter, gradient and two states.
std::vector<Buffer> updated_on_cpu(const Buffer& content, const AdamParams& group,
                                   const StepScalars& scalars) {
  std::vector<Buffer> operands(4, content);
  float step = 3.0f;
  Rows rows;
  rows.add({.param = operands[0].data(),
            .grad = operands[1].data(),
            .state = {operands[2].data(), operands[3].data()},
            .step = &step,
            .numel = content.numel()});
  fused_update_cpu(detect_cpu_isa(), update_args(rows, content.dtype(), group, scalars), 0,
                   content.numel());
  return operands;
}

TEST_F(LargeOffsets, UpdateChangesTheElementsOfTheseChunks) {
  const AdamParams group = adam_params();
  const StepScalars scalars{0.5, 0.0f, 0.0f};
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const std::int64_t offset : {0, 1}) {
      std::vector<std::unique_ptr<SparseTensor>> operands;
      for (int s = 0; s < 4; ++s) operands.push_back(make_tensor(dtype, s == 1 ? offset : 0));
      float step = 3.0f;
      Rows rows;
      rows.add({.param = operands[0]->data(),
                .grad = operands[1]->data(),
                .state = {operands[2]->data(), operands[3]->data()},
                .step = &step,
                .numel = kNumel});
      select(dtype, 0);
      expect_launched(fused_update_cuda(update_args(rows, dtype, group, scalars), nullptr),
                      kBlocks);
      const auto all = parts(dtype);
      for (std::size_t part = 0; part < all.size(); ++part) {
        const auto expected =
            updated_on_cpu(content_of(dtype, all[part].count, part), group, scalars);
        for (std::size_t s = 0; s < operands.size(); ++s) {
          EXPECT_TRUE(operands[s]->read(all[part].first, all[part].count) == expected[s])
              << "operand " << s << " from element " << all[part].first << " of dtype "
              << int(dtype);
        }
      }
    }
  }
}

/// y = x + x, with statistics that change nothing.
void expect_doubled(const BatchNormShape& shape) {
  const auto x = make_tensor(shape.dtype, 0);
  const auto y = make_tensor(shape.dtype, 0);
  std::vector<double> saved(static_cast<std::size_t>(2 * shape.channels + 1));
  BatchNormFinishArgs finish;
  finish.channels = shape.channels;
  finish.eps = 0.0;
  finish.saved = saved.data();
  BatchNormElemtArgs args;
  args.shape = shape;
  args.input = {x->data(), shape.channels * shape.inner, shape.inner};
  args.residual = args.input;
  args.output = y->data();
  // So many that every thread has its least number of windows: whole fractions of a chunk.
  constexpr int kMultiprocessors = 1 << 22;
  const Status status =
      batch_norm_elemt_cuda(args, finish, {nullptr, nullptr, kMultiprocessors}, nullptr);
  ASSERT_TRUE(status.ok()) << status.what << ": " << last_fault();
  const auto all = parts(shape.dtype);
  for (std::size_t part = 0; part < all.size(); ++part) {
    Buffer expected = content_of(shape.dtype, all[part].count, part);
    for (std::int64_t i = 0; i < expected.numel(); ++i) expected.set(i, 2 * expected.get(i));
    EXPECT_TRUE(y->read(all[part].first, all[part].count) == expected)
        << "from element " << all[part].first << " of dtype " << int(shape.dtype);
  }
}

TEST_F(LargeOffsets, BatchNormWritesTheElementsOfTheseChunks) {
  for (const DType dtype : kEveryDType) {
    // 256 threads, four windows of 16 bytes each. Channels last, blocks share rows, but not those
    // of two chunks.
    const std::int64_t block_elements = 256 * 4 * 16 / static_cast<std::int64_t>(size_of(dtype));
    for (const BatchNormShape& shape : {BatchNormShape{1, 1, kNumel, false, dtype},
                                        BatchNormShape{kNumel / kTail, kTail, 1, true, dtype}}) {
      select(dtype, 0, block_elements);
      expect_doubled(shape);
    }
  }
}

}  // namespace
}  // namespace cuda_on_cpu
