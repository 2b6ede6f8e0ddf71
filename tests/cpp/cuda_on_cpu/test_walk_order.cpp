// SPDX-License-Identifier: BSD-3-Clause
// In which order an update walks through its elements: blocks run one by one, and what each changes
// is looked up.
#include <gtest/gtest.h>

#include <cstring>
#include <utility>
#include <vector>

#include "engine.h"
#include "kernels/cuda/rows_on_device.h"
#include "kernels/functors/adam.h"
#include "kernels/functors/lamb.h"
#include "kernels/kernel_test.h"
#include "kernels/layerwise_optimizer.h"

namespace cuda_on_cpu {
namespace {

using namespace torchfuse::kernels;
using torchfuse::kernels::testing::Rows;
using torchfuse::kernels::testing::RowsOnDevice;

/// A tensor and a chunk of it.
using Chunk = std::pair<std::size_t, std::size_t>;

/// Elements that a block handles in lists as short as these.
constexpr std::int64_t kChunk = 1024;

/// Tensors of fp32: the parameters are 1, all else is 0.5.
struct Tensors {
  std::vector<std::vector<float>> params, grads, first_states, second_states;
  float step = 1.0f;
  Rows rows;

  explicit Tensors(const std::vector<std::int64_t>& sizes) {
    for (auto* list : {&params, &grads, &first_states, &second_states}) {
      for (const std::int64_t numel : sizes) {
        list->emplace_back(static_cast<std::size_t>(numel), list == &params ? 1.0f : 0.5f);
      }
    }
    for (std::size_t t = 0; t < sizes.size(); ++t) {
      rows.add({.param = params[t].data(),
                .grad = grads[t].data(),
                .state = {first_states[t].data(), second_states[t].data()},
                .step = &step,
                .numel = sizes[t]});
    }
  }

  /// The chunks in which `list` is not what it was made of.
  static std::vector<Chunk> changed(const std::vector<std::vector<float>>& list, float before) {
    std::vector<Chunk> result;
    for (std::size_t t = 0; t < list.size(); ++t) {
      for (std::size_t i = 0; i < list[t].size(); i += kChunk) {
        if (list[t][i] != before) result.emplace_back(t, i / kChunk);
      }
    }
    return result;
  }
};

class WalkOrder : public ::testing::Test {
 protected:
  ~WalkOrder() override { set_schedule({}); }

  /// What block 0, 1, ... of all launches of `enqueue` change in a list that begins as `before`.
  template <class Enqueue>
  static std::vector<std::vector<Chunk>> walk(const std::vector<std::int64_t>& sizes,
                                              std::uint32_t blocks,
                                              std::vector<std::vector<float>> Tensors::* list,
                                              float before, const Enqueue& enqueue) {
    std::vector<std::vector<Chunk>> steps;
    for (std::uint32_t chosen = 0; chosen < blocks; ++chosen) {
      Tensors tensors(sizes);
      set_schedule({.selected = [chosen](std::uint32_t block) { return block == chosen; }});
      const Status status = enqueue(tensors);
      EXPECT_TRUE(status.ok()) << status.what << ": " << last_fault();
      steps.push_back(Tensors::changed(tensors.*list, before));
    }
    return steps;
  }

  template <class Functor>
  static UpdateArgs<Functor> args(const Tensors& tensors, const typename Functor::Params& group,
                                  const StepScalars& scalars, bool from_the_end) {
    UpdateArgs<Functor> result;
    result.tensors = tensors.rows.table(DType::kFloat32, DType::kFloat32, DType::kFloat32);
    result.groups = &group;
    result.num_groups = 1;
    result.scalars = &scalars;
    result.from_the_end = from_the_end;
    return result;
  }

  static std::vector<std::vector<Chunk>> updated(const std::vector<std::int64_t>& sizes,
                                                 std::uint32_t blocks, bool from_the_end,
                                                 bool rows_on_device = false) {
    AdamParams group;
    group.lr.value = 0.1;
    const StepScalars scalars{1.0, 0.0f, 0.0f};
    return walk(sizes, blocks, &Tensors::params, 1.0f, [&](const Tensors& tensors) {
      UpdateArgs<Adam> update = args<Adam>(tensors, group, scalars, from_the_end);
      const std::vector<std::int64_t> chunk_offsets(sizes.size() + 1);
      const RowsOnDevice kept(update.tensors, chunk_offsets.data(), kChunk);
      if (rows_on_device) update.tensors.device = kept.get();
      return fused_update_cuda(update, nullptr);
    });
  }
};

const std::vector<std::int64_t> kSizes{3, 2500, 700, 5, 3 * kChunk};

TEST_F(WalkOrder, UpdateBeginsWithTheFirstTensor) {
  const std::vector<std::vector<Chunk>> expected{{{0, 0}, {3, 0}}, {{1, 0}}, {{1, 1}}, {{1, 2}},
                                                 {{2, 0}},         {{4, 0}}, {{4, 1}}, {{4, 2}}};
  EXPECT_EQ(updated(kSizes, 8, false), expected);
}

// Small tensors come first all the same: they take long for their size.
TEST_F(WalkOrder, UpdateFromTheEndBeginsWithTheLastChunk) {
  const std::vector<std::vector<Chunk>> expected{{{0, 0}, {3, 0}}, {{4, 2}}, {{4, 1}}, {{4, 0}},
                                                 {{2, 0}},         {{1, 2}}, {{1, 1}}, {{1, 0}}};
  EXPECT_EQ(updated(kSizes, 8, true), expected);
}

TEST_F(WalkOrder, UpdateOfRowsOnTheDeviceBeginsWithTheFirstTensor) {
  EXPECT_EQ(updated(kSizes, 8, false, true), updated(kSizes, 8, false));
}

// A span has one order of blocks, so small tensors come last.
TEST_F(WalkOrder, UpdateOfRowsOnTheDeviceFromTheEndBeginsWithTheLastBlock) {
  const std::vector<std::vector<Chunk>> expected{{{4, 2}}, {{4, 1}}, {{4, 0}}, {{2, 0}},
                                                 {{1, 2}}, {{1, 1}}, {{1, 0}}, {{0, 0}, {3, 0}}};
  EXPECT_EQ(updated(kSizes, 8, true, true), expected);
}

TEST_F(WalkOrder, MeasureFromTheEndWritesThePartialsOfItsChunks) {
  LambParams group;
  const StepScalars scalars{1.0, 0.0f, 0.0f};
  const std::vector<std::int64_t> chunk_offsets{0, 1, 4, 5, 6, 9};
  std::vector<std::vector<MeasurePartial>> results;
  for (const bool from_the_end : {false, true}) {
    Tensors tensors(kSizes);
    // Chunks that can be told apart.
    for (std::size_t t = 0; t < kSizes.size(); ++t) {
      for (std::size_t i = 0; i < tensors.params[t].size(); ++i) {
        tensors.params[t][i] = static_cast<float>(1 + t + i / kChunk);
      }
    }
    std::vector<MeasurePartial> partials(9 * Lamb::kNumNorms);
    std::vector<double> norms(kSizes.size() * Lamb::kNumNorms);
    MeasureArgs<Lamb> measure{args<Lamb>(tensors, group, scalars, from_the_end),
                              chunk_offsets.data(), partials.data(), norms.data()};
    measure.chunk = kChunk;
    set_schedule({.seed = 1});
    const Status status = fused_measure_cuda(measure, nullptr);
    EXPECT_TRUE(status.ok()) << status.what << ": " << last_fault();
    results.push_back(partials);
  }
  ASSERT_EQ(results[0].size(), results[1].size());
  EXPECT_EQ(
      std::memcmp(results[0].data(), results[1].data(), results[0].size() * sizeof(MeasurePartial)),
      0);
  // Of the first norm, the parameter's: those of tensor 4, whose chunks hold 5, 6 and 7.
  for (const std::size_t chunk : {0u, 1u, 2u}) {
    const double value = 5.0 + static_cast<double>(chunk);
    EXPECT_EQ(results[1][(6 + chunk) * Lamb::kNumNorms].largest, value);
  }
}

}  // namespace
}  // namespace cuda_on_cpu
