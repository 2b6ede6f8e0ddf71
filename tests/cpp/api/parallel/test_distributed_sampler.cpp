// SPDX-License-Identifier: BSD-3-Clause
// Its indices are compared with Python's in tests/python/parallel/test_data_parallel_program.py.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/parallel/distributed_sampler.h>

#include <sstream>
#include <vector>

#include "parallel_testing.h"

namespace torchfuse::testing {
namespace {

using parallel::DistributedSampler;
using parallel::DistributedSamplerOptions;
using Indices = std::vector<std::size_t>;

TEST(DistributedSampler, RanksShareTheDataAndStartAgainAtItsEnd) {
  const auto indices = [](std::int64_t rank, bool drop_last) {
    const auto options =
        DistributedSamplerOptions().num_replicas(3).rank(rank).shuffle(false).drop_last(drop_last);
    return DistributedSampler(7, options).indices();
  };
  EXPECT_EQ(indices(0, false), (Indices{0, 3, 6}));
  EXPECT_EQ(indices(2, false), (Indices{2, 5, 1}));
  EXPECT_EQ(indices(2, true), (Indices{2, 5}));
}

TEST(DistributedSampler, BatchesCoverTheIndices) {
  DistributedSampler sampler(10, DistributedSamplerOptions().shuffle(false));
  Indices seen;
  std::vector<std::size_t> sizes;
  while (const auto batch = sampler.next(4)) {
    sizes.push_back(batch->size());
    seen.insert(seen.end(), batch->begin(), batch->end());
  }
  EXPECT_EQ(seen, sampler.indices());
  EXPECT_EQ(sizes, (std::vector<std::size_t>{4, 4, 2}));
}

TEST(DistributedSampler, ADataLoaderFollowsTheEpoch) {
  const auto data = torch::arange(8, torch::kFloat);
  const auto set = torch::data::datasets::TensorDataset(data).map(
      torch::data::transforms::Stack<torch::data::TensorExample>());
  DistributedSampler sampler(8);
  auto loader = torch::data::make_data_loader(set, sampler, 3);
  std::vector<Indices> epochs;
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    sampler.set_epoch(epoch);
    sampler.reset();
    Indices found;
    for (const auto& batch : *loader) {
      for (std::int64_t row = 0; row < batch.data.size(0); ++row) {
        found.push_back(batch.data[row].item<std::int64_t>());
      }
    }
    EXPECT_EQ(found, sampler.indices());
    epochs.push_back(found);
  }
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_NE(epochs[1], epochs[2]);
}

TEST(DistributedSampler, GoesOnWhereItWasSaved) {
  DistributedSampler saved(10);
  saved.set_epoch(5);
  saved.reset();
  saved.next(3);
  std::stringstream stream;
  torch::serialize::OutputArchive output;
  saved.save(output);
  output.save_to(stream);
  DistributedSampler loaded(10);
  torch::serialize::InputArchive input;
  input.load_from(stream);
  loaded.load(input);
  EXPECT_EQ(loaded.epoch(), 5);
  EXPECT_EQ(loaded.next(4), saved.next(4));
  DistributedSampler smaller(2);
  EXPECT_ERROR([&] { smaller.load(input); }, "expected the saved position to be at most 2, got 3.");
}

TEST(DistributedSampler, RefusesImpossiblePlaces) {
  EXPECT_ERROR([] { DistributedSampler(0); }, "expected size to be at least 1, got 0.");
  EXPECT_ERROR([] { DistributedSampler(1, DistributedSamplerOptions().num_replicas(0)); },
               "expected num_replicas to be at least 1, got 0.");
  EXPECT_ERROR([] { DistributedSampler(1, DistributedSamplerOptions().rank(1)); },
               "expected rank to be at least 0 and below num_replicas 1, got 1.");
}

}  // namespace
}  // namespace torchfuse::testing
