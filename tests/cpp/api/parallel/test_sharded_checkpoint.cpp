// SPDX-License-Identifier: BSD-3-Clause
// A checkpoint with a file for each rank loads bit for bit what one file holds, in any number of
// ranks.
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torchfuse/checkpoint.h>
#include <torchfuse/optim/fused_adam.h>
#include <torchfuse/parallel/sharded_optimizer.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "../optim/optim_testing.h"
#include "scattered_testing.h"
#include "sharded_classes.h"
#include "sharded_folder.h"
#include "sharded_testing.h"

namespace torchfuse::sharded_testing {
namespace {

using optim::FusedAdam;
using optim::FusedAdamOptions;
using parallel::ProcessGroup;
using parallel::ShardedOptimizer;
using testing::AllClasses;
using testing::ClassNames;
using testing::expect_equal;

using Named = std::vector<std::pair<std::string, torch::Tensor>>;

/// Bit for bit.
void expect_tensors(const Named& found, const Named& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].first, expected[i].first);
    EXPECT_EQ(found[i].second.scalar_type(), expected[i].second.scalar_type()) << found[i].first;
    EXPECT_TRUE(torch::equal(found[i].second, expected[i].second)) << found[i].first;
  }
}

template <class Type>
class ShardedCheckpointClasses : public ::testing::Test {};
TYPED_TEST_SUITE(ShardedCheckpointClasses, AllClasses, ClassNames);

TYPED_TEST(ShardedCheckpointClasses, LoadWhatOneFileHolds) {
  using Options = typename TypeParam::Options;
  using Optimizer = typename TypeParam::Optimizer;
  const ShardedFolder folder;
  for (const std::int64_t writers : {1, 3}) {
    run_on_ranks(writers, [&](ProcessGroup& group) {
      for (const Storage& storage : storages()) {
        const auto params = sharded_params(storage.dtype);
        ShardedOptimizer<Optimizer> optimizer(params, options_with<Options>(storage), group);
        train_sharded(optimizer, params, 0, 2);
        const auto checkpoint = Checkpoint().optimizer(optimizer).group(group);
        save_checkpoint(folder / (std::string(storage.name) + ".pt"), checkpoint);
        save_sharded_checkpoint(folder / storage.name, checkpoint);
      }
    });
    for (const std::int64_t readers : {1, 2, 3, 4}) {
      run_on_ranks(readers, [&](ProcessGroup& group) {
        for (const Storage& storage : storages()) {
          SCOPED_TRACE(c10::str(storage.name, ", ", writers, " to ", readers, " ranks"));
          const auto params = sharded_params(storage.dtype);
          Optimizer alone(clones_of(params), options_with<Options>(storage));
          load_checkpoint(folder / (std::string(storage.name) + ".pt"),
                          Checkpoint().optimizer(alone).group(group));
          ShardedOptimizer<Optimizer> optimizer(params, options_with<Options>(storage), group);
          load_sharded_checkpoint(folder / storage.name,
                                  Checkpoint().optimizer(optimizer).group(group));
          expect_tensors(tensors_of(optimizer), tensors_of(alone));
          EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(),
                    alone.param_groups()[0].options().get_lr());
        }
      });
    }
  }
}

TEST(ShardedCheckpoint, GoesOnInTheClassAlone) {
  const ShardedFolder folder;
  const auto whole = sharded_params();
  FusedAdam expected(whole, FusedAdamOptions(0.01));
  train_sharded(expected, whole, 0, 4);
  run_on_ranks(2, [&](ProcessGroup& group) {
    ShardedModel model;
    ShardedOptimizer<FusedAdam> optimizer(model.parameters(), FusedAdamOptions(0.01), group);
    train_sharded(optimizer, model.parameters(), 0, 2);
    auto checkpoint = Checkpoint().model(model).optimizer(optimizer).rng().group(group);
    save_sharded_checkpoint(folder / "", checkpoint.value("epoch", 3));
  });
  ShardedModel model;
  FusedAdam optimizer(model.parameters(), FusedAdamOptions(0.5));
  auto checkpoint = Checkpoint().model(model).optimizer(optimizer);
  const auto values = load_sharded_checkpoint(folder.path(), checkpoint);
  EXPECT_EQ(values.at("epoch").toInt(), 3);
  train_sharded(optimizer, model.parameters(), 2, 4);
  expect_equal(model.parameters(), whole);
  // A program of one process may write a folder too, and ranks go on from it.
  save_sharded_checkpoint(folder.path(), checkpoint);
  run_on_ranks(3, [&](ProcessGroup& group) {
    ShardedModel again;
    ShardedOptimizer<FusedAdam> split(again.parameters(), FusedAdamOptions(0.5), group);
    load_sharded_checkpoint(folder.path(), Checkpoint().model(again).optimizer(split).group(group));
    expect_equal(again.parameters(), whole);
    expect_tensors(tensors_of(split), tensors_of(optimizer));
  });
}

TEST(ShardedCheckpoint, AModelInAnotherMemoryFormatLoadsIt) {
  const ShardedFolder folder;
  run_on_ranks(3, [&](ProcessGroup& group) {
    const auto params = sharded_params();
    ShardedOptimizer<FusedAdam> optimizer(params, FusedAdamOptions(0.01), group);
    train_sharded(optimizer, params, 0, 2);
    save_sharded_checkpoint(folder.path(), Checkpoint().optimizer(optimizer).group(group));
    ASSERT_FALSE(params.back().is_contiguous());
    auto contiguous = clones_of(sharded_params());
    contiguous.back() = contiguous.back().detach().contiguous().requires_grad_(true);
    ShardedOptimizer<FusedAdam> other(contiguous, FusedAdamOptions(0.5), group);
    load_sharded_checkpoint(folder.path(), Checkpoint().optimizer(other).group(group));
    expect_tensors(tensors_of(other), tensors_of(optimizer));
  });
}

TEST(ShardedCheckpoint, OfSplitGradientsLoadsWhereTheseAreWhole) {
  const ShardedFolder folder;
  run_on_ranks(2, [&](ProcessGroup& group) {
    ScatteredNet net;
    ScatteredModel model(net, group, small_buckets());
    ShardedOptimizer<FusedAdam> optimizer(net->parameters(), FusedAdamOptions(0.01), model);
    scattered_loss(model, group.rank(), 0).backward();
    optimizer.step();
    save_sharded_checkpoint(folder.path(), Checkpoint().optimizer(optimizer).group(group));
    ScatteredNet other;
    ShardedOptimizer<FusedAdam> whole(other->parameters(), FusedAdamOptions(0.5), group);
    load_sharded_checkpoint(folder.path(), Checkpoint().optimizer(whole).group(group));
    expect_tensors(tensors_of(whole), tensors_of(optimizer));
  });
}

TEST(ShardedCheckpoint, ARankWritesItsOwnPartsAlone) {
  const ShardedFolder folder;
  run_on_ranks(4, [&](ProcessGroup& group) {
    const std::vector<torch::Tensor> params{torch::ones({400'000}, torch::requires_grad())};
    ShardedOptimizer<FusedAdam> optimizer(params, FusedAdamOptions(0.01), group);
    train_sharded(optimizer, params, 0, 1);
    save_sharded_checkpoint(folder.path(), Checkpoint().optimizer(optimizer).group(group));
  });
  for (const std::string& file : folder.files()) {
    const auto bytes = std::filesystem::file_size(folder / file);
    // Two states of 100,000 numbers.
    EXPECT_LT(bytes, file == "index.pt" ? 10'000 : 810'000) << file;
  }
}

TEST(ShardedCheckpoint, TheFilesBeforeAreRemovedAndOthersStay) {
  const ShardedFolder folder;
  // Names that only resemble those of a save's files.
  const std::vector<std::string> own{"index.pt.tmp-notes", "rank0-0123456789abcdef.pt.tmp-mine",
                                     "rank0-notes.pt"};
  const std::vector<std::string> cut{"index.pt.tmp-0123456789abcdef", "rank7-0123456789abcdef.pt",
                                     "rank7-0123456789abcdef.pt.tmp-0123456789abcdef"};
  const auto an_hour_ago = std::filesystem::file_time_type::clock::now() - std::chrono::hours(1);
  for (const auto& names : {own, cut}) {
    for (const std::string& name : names) {
      folder.write(name);
      std::filesystem::last_write_time(folder / name, an_hour_ago);
    }
  }
  std::vector<std::string> first;
  for (const std::int64_t ranks : {3, 2}) {
    run_on_ranks(ranks, [&](ProcessGroup& group) {
      const auto params = sharded_params();
      ShardedOptimizer<FusedAdam> optimizer(params, FusedAdamOptions(0.01), group);
      save_sharded_checkpoint(folder.path(), Checkpoint().optimizer(optimizer).group(group));
    });
    const auto files = folder.files();
    const auto has = [&](const std::string& name) {
      return std::count(files.begin(), files.end(), name);
    };
    for (const std::string& name : own) EXPECT_EQ(has(name), 1) << name;
    // What is older than the index that a save replaces is of no other save.
    const bool replaced = !first.empty();
    for (const std::string& name : cut) EXPECT_EQ(has(name), replaced ? 0 : 1) << name;
    EXPECT_EQ(files.size(),
              static_cast<std::size_t>(ranks) + 1 + own.size() + (replaced ? 0 : cut.size()));
    for (const std::string& name : first) {
      if (name.starts_with("rank") && std::count(own.begin(), own.end(), name) == 0) {
        EXPECT_EQ(has(name), 0) << name;
      }
    }
    first = files;
  }
}

TEST(ShardedCheckpoint, LinksToTheFilesOfAnotherOneLeaveItAlone) {
  const ShardedFolder folder;
  const std::string first = folder / "first";
  const std::string links = folder / "links";
  std::filesystem::create_directory(links);
  run_on_ranks(2, [&](ProcessGroup& group) {
    const auto params = sharded_params();
    ShardedOptimizer<FusedAdam> optimizer(params, {}, group);
    Checkpoint checkpoint = Checkpoint().optimizer(optimizer).group(group);
    const auto step_in = [&](const std::string& place) {
      return load_sharded_checkpoint(place, checkpoint).at("step").toInt();
    };
    save_sharded_checkpoint(first, checkpoint.value("step", 2));
    if (group.rank() == 0) {
      for (const auto& entry : std::filesystem::directory_iterator(first)) {
        std::filesystem::create_symlink(entry.path(),
                                        std::filesystem::path(links) / entry.path().filename());
      }
    }
    EXPECT_EQ(step_in(first), 2);  // both ranks go on when the links are there
    EXPECT_EQ(step_in(links), 2);
    save_sharded_checkpoint(links, checkpoint.value("step", 7));
    EXPECT_EQ(step_in(links), 7);
    EXPECT_EQ(step_in(first), 2);
  });
}

TEST(ShardedCheckpoint, ALinkToNothingInThePlaceOfTheFolder) {
  const ShardedFolder folder;
  std::filesystem::create_symlink(folder / "none", folder / "link");
  try {
    save_sharded_checkpoint(folder / "link", Checkpoint());
    FAIL() << "saved";
  } catch (const c10::ValueError& error) {
    EXPECT_EQ(error.what_without_backtrace(),
              "save_sharded_checkpoint: expected " + (folder / "link") +
                  " to be a folder or a new name, got a symbolic link to nothing. Name a folder.");
  }
}

}  // namespace
}  // namespace torchfuse::sharded_testing
