// SPDX-License-Identifier: BSD-3-Clause
// What does not load is refused in the same words by all ranks, which keep what they have; a save
// that fails leaves the checkpoint before.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <torch/torch.h>
#include <torchfuse/checkpoint.h>
#include <torchfuse/optim/fused_adam.h>
#include <torchfuse/optim/fused_lion.h>
#include <torchfuse/parallel/sharded_optimizer.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "sharded_folder.h"
#include "sharded_testing.h"

namespace torchfuse::sharded_testing {
namespace {

using optim::FusedAdam;
using optim::FusedAdamOptions;
using parallel::ProcessGroup;
using parallel::ShardedOptimizer;

class ShardedCheckpointErrors : public ::testing::Test {
 protected:
  ShardedCheckpointErrors() {
    run_on_ranks(2, [&](ProcessGroup& group) {
      const auto params = sharded_params();
      ShardedOptimizer<FusedAdam> optimizer(params, FusedAdamOptions(0.01), group);
      train_sharded(optimizer, params, 0, 2);
      save_sharded_checkpoint(folder_.path(), described(optimizer, group));
    });
  }

  static Checkpoint described(optim::FusedOptimizer& optimizer, const ProcessGroup& group) {
    return Checkpoint().optimizer(optimizer).value("step", 2).group(group);
  }

  /// All of two ranks refuse to load it into such parameters, and change nothing.
  template <class Optimizer = FusedAdam>
  void expect_refused(const std::string& begin,
                      const std::vector<torch::Tensor>& like = sharded_params()) {
    expect_refusal(begin, [&](ProcessGroup& group) {
      const auto params = clones_of(like);
      ShardedOptimizer<Optimizer> optimizer(params, {}, group);
      train_sharded(optimizer, params, 0, 1);
      const auto before = first_state(optimizer);
      const double lr = optimizer.param_groups()[0].options().get_lr();
      try {
        load_sharded_checkpoint(folder_.path(), described(optimizer, group));
      } catch (const c10::Error&) {
        EXPECT_TRUE(torch::equal(first_state(optimizer), before));
        EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), lr);
        throw;
      }
    });
  }

  static torch::Tensor first_state(const optim::FusedOptimizer& optimizer) {
    const auto states = optimizer.state_dict().at("state").toGenericDict();
    return states.at(0).toGenericDict().at("exp_avg").toTensor();
  }

  ShardedFolder folder_;
};

TEST_F(ShardedCheckpointErrors, AMissingFile) {
  const std::string path = folder_.file_of(1);
  const auto bytes = std::filesystem::file_size(path);
  std::filesystem::remove(path);
  expect_refused(c10::str(kLoads, "expected ", path, " to be a file of ", bytes,
                          " bytes, as index.pt says, got none. Load another checkpoint, or "
                          "this one again if it was saved meanwhile."));
}

TEST_F(ShardedCheckpointErrors, ATruncatedFile) {
  const std::string path = folder_.file_of(0);
  const auto bytes = std::filesystem::file_size(path);
  std::filesystem::resize_file(path, bytes - 100);
  expect_refused(c10::str(kLoads, "expected ", path, " to be a file of ", bytes,
                          " bytes, as index.pt says, got ", bytes - 100, " bytes."));
}

TEST_F(ShardedCheckpointErrors, ADamagedFile) {
  const std::string path = folder_.file_of(1);
  std::string bytes;
  {
    std::ifstream file(path, std::ios::binary);
    bytes.assign(std::istreambuf_iterator<char>(file), {});
  }
  // Bytes of a record lie behind its name, at multiples of 64.
  const std::size_t record = bytes.find("data/0");
  ASSERT_NE(record, std::string::npos);
  const std::size_t place = (record + 128) / 64 * 64;
  bytes[place] = static_cast<char>(bytes[place] ^ 1);
  std::ofstream(path, std::ios::binary) << bytes;
  expect_refused(c10::str(kLoads, folder_ / "index.pt", "'s 'optimizer' does not fit: ", kLoads,
                          "expected ", path, " to hold data/0 as it was written, got other bytes"));
}

TEST_F(ShardedCheckpointErrors, AMissingIndex) {
  std::filesystem::remove(folder_ / "index.pt");
  expect_refused(c10::str(kLoads, "expected ", folder_ / "index.pt", " to be a file, got none."));
}

TEST_F(ShardedCheckpointErrors, ATruncatedIndex) {
  const std::string path = folder_ / "index.pt";
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 10);
  expect_refused(c10::str(kLoads, "expected ", path, " to be a whole file of "));
}

TEST_F(ShardedCheckpointErrors, AFileOfOneCheckpointAsAnIndex) {
  save_checkpoint(folder_ / "index.pt", Checkpoint().value("step", 2));
  expect_refused(c10::str(kLoads, "expected ", folder_ / "index.pt", " to hold 'sharded', got"));
}

TEST_F(ShardedCheckpointErrors, OtherShapes) {
  auto params = sharded_params();
  params[2] = waves({33, 64}, 2.0).to(torch::kFloat).requires_grad_(true);
  expect_refused(c10::str(kLoads, folder_ / "index.pt", "'s 'optimizer' does not fit: ",
                          "expected state[2]['exp_avg'] to have the sizes [33, 64] of its "
                          "parameter, got [64, 33]."),
                 params);
}

TEST_F(ShardedCheckpointErrors, OtherParameters) {
  auto params = sharded_params();
  params.pop_back();
  expect_refused(c10::str(kLoads, folder_ / "index.pt", "'s 'optimizer' does not fit: torchfuse::",
                          "parallel::ShardedOptimizer::load_state_dict: expected the state of 6 "
                          "parameters, got that of 7."),
                 params);
}

TEST_F(ShardedCheckpointErrors, AnotherClass) {
  expect_refused<optim::FusedLion>(
      c10::str(kLoads, "expected ", folder_ / "index.pt",
               " to hold the state of FusedLion as 'optimizer', got that of FusedAdam."));
}

TEST_F(ShardedCheckpointErrors, AnotherName) {
  expect_refusal(c10::str(kLoads, "expected ", folder_ / "index.pt", " to hold 'adam', got"),
                 [&](ProcessGroup& group) {
                   ShardedOptimizer<FusedAdam> optimizer(sharded_params(), {}, group);
                   load_sharded_checkpoint(folder_.path(),
                                           Checkpoint().optimizer(optimizer, "adam").group(group));
                 });
}

/// Saves with something wrong, after which the checkpoint before loads.
void expect_kept(const ShardedFolder& folder, const std::string& begin,
                 const std::function<void(ShardedOptimizer<FusedAdam>&, ProcessGroup&)>& save) {
  expect_refusal(begin, [&](ProcessGroup& group) {
    const auto params = sharded_params();
    ShardedOptimizer<FusedAdam> optimizer(params, FusedAdamOptions(0.5), group);
    train_sharded(optimizer, params, 0, 1);
    try {
      save(optimizer, group);
    } catch (const c10::Error&) {
      const auto values =
          load_sharded_checkpoint(folder.path(), Checkpoint().optimizer(optimizer).group(group));
      EXPECT_EQ(values.at("step").toInt(), 2);
      // Two steps had halved it twice.
      EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.01 * 0.25);
      throw;
    }
  });
}

TEST_F(ShardedCheckpointErrors, WhatCannotBeSavedLeavesTheCheckpointBefore) {
  expect_kept(folder_, "save_sharded_checkpoint: expected the checkpoint['values']['sparse']",
              [&](auto& optimizer, ProcessGroup& group) {
                const auto sparse = torch::eye(2).to_sparse();
                save_sharded_checkpoint(folder_.path(),
                                        described(optimizer, group).value("sparse", sparse));
              });
}

TEST_F(ShardedCheckpointErrors, ARankThatFailsLeavesTheCheckpointBefore) {
  const auto files = folder_.files();
  const std::string elsewhere = folder_ / "none/of/these";
  expect_kept(folder_,
              c10::str("save_sharded_checkpoint: could not create a file in the folder of ",
                       elsewhere, "/rank1-"),
              [&](auto& optimizer, ProcessGroup& group) {
                save_sharded_checkpoint(group.rank() == 0 ? folder_.path() : elsewhere,
                                        described(optimizer, group));
              });
  EXPECT_EQ(folder_.files(), files);  // rank 0 has taken its own back
}

TEST_F(ShardedCheckpointErrors, RanksThatSeeOtherFoldersLeaveTheCheckpointBefore) {
  const std::string elsewhere = folder_ / "other";
  std::filesystem::create_directory(elsewhere);
  const auto files = folder_.files();
  expect_kept(folder_, c10::str("save_sharded_checkpoint: expected ", folder_ / "rank1-"),
              [&](auto& optimizer, ProcessGroup& group) {
                save_sharded_checkpoint(group.rank() == 0 ? folder_.path() : elsewhere,
                                        described(optimizer, group));
              });
  EXPECT_EQ(folder_.files(), files);
}

/// The save that holds the lock removes the files of others.
TEST_F(ShardedCheckpointErrors, ASaveWaitsForTheOneThatReplacesTheIndex) {
  const auto files = folder_.files();
  const int lock = ::open(folder_.path().c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(::flock(lock, LOCK_EX), 0);
  std::thread other([&] {
    std::vector<std::string> written;
    while (written.size() < 2) {
      written.clear();
      for (const std::string& name : folder_.files()) {
        const bool before = std::find(files.begin(), files.end(), name) != files.end();
        if (!before && name.ends_with(".pt")) written.push_back(name);
      }
    }
    for (const std::string& name : written) std::filesystem::remove(folder_ / name);
    ::close(lock);
  });
  // Rank 0's says it, or if a rank has not looked at its own file yet, that one's.
  expect_kept(folder_, c10::str("save_sharded_checkpoint: expected ", folder_ / "rank"),
              [&](auto& optimizer, ProcessGroup& group) {
                save_sharded_checkpoint(folder_.path(), described(optimizer, group));
              });
  other.join();
  EXPECT_EQ(folder_.files(), files);
}

TEST_F(ShardedCheckpointErrors, AnIndexThatCannotBeWrittenLeavesNoFiles) {
  const std::filesystem::path other = folder_ / "other";
  std::filesystem::create_directories(other / "index.pt");
  expect_kept(folder_,
              c10::str("save_sharded_checkpoint: expected ", (other / "index.pt").string(),
                       " to be a file, got a folder."),
              [&](auto& optimizer, ProcessGroup& group) {
                save_sharded_checkpoint(other, described(optimizer, group));
              });
  std::filesystem::remove(other / "index.pt");
  EXPECT_TRUE(std::filesystem::is_empty(other));
}

TEST_F(ShardedCheckpointErrors, AnIndexThatIsReplacedBetweenTheReadsOfTwoRanks) {
  const std::string later = folder_ / "later";
  run_on_ranks(2, [&](ProcessGroup& group) {
    ShardedOptimizer<FusedAdam> optimizer(sharded_params(), {}, group);
    save_sharded_checkpoint(later, described(optimizer, group));
  });
  expect_refusal(c10::str(kLoads, "expected ", later, "/index.pt to be of one save in all ranks, ",
                          "got another in rank 1 than in rank 0: "),
                 [&](ProcessGroup& group) {
                   ShardedOptimizer<FusedAdam> optimizer(sharded_params(), {}, group);
                   load_sharded_checkpoint(group.rank() == 0 ? folder_.path() : later,
                                           described(optimizer, group));
                 });
}

TEST_F(ShardedCheckpointErrors, AFileInThePlaceOfTheFolder) {
  folder_.write("file");
  expect_kept(folder_,
              c10::str("save_sharded_checkpoint: expected ", folder_ / "file",
                       " to be a folder or a new name, got a file. Name a folder."),
              [&](auto& optimizer, ProcessGroup& group) {
                save_sharded_checkpoint(folder_ / "file", described(optimizer, group));
              });
}

TEST_F(ShardedCheckpointErrors, AnotherGroup) {
  const auto errors = on_ranks(2, [&](ProcessGroup& group) {
    ShardedOptimizer<FusedAdam> optimizer(sharded_params(), {}, group);
    save_sharded_checkpoint(folder_.path(), Checkpoint().optimizer(optimizer));
  });
  for (const std::string& error : errors) {
    EXPECT_EQ(error,
              "save_sharded_checkpoint: expected the group of the 2 processes that share the "
              "states of 'optimizer', got one of 1, or in another order. Call group(group) with "
              "the optimizer's.");
  }
}

}  // namespace
}  // namespace torchfuse::sharded_testing
