// SPDX-License-Identifier: BSD-3-Clause
// Saves into one folder at the same time: none loses a checkpoint, and none waits without end.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <torchfuse/checkpoint.h>
#include <torchfuse/optim/fused_adam.h>
#include <torchfuse/parallel/sharded_optimizer.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>

#include "sharded_folder.h"
#include "sharded_testing.h"

namespace {

/// What happens when an index is about to be replaced; `temporary` has its new bytes.
std::function<void(const char* temporary)> before_replacement;
/// As on a network file system whose locks are those of one machine.
bool locks_do_nothing = false;
/// A busy disk may take longer than the timeout of a group.
bool disk_is_fast = false;

}  // namespace

// The library calls these in the place of the system's: they are visible to it.
extern "C" __attribute__((visibility("default"))) int rename(const char* from,
                                                             const char* to) noexcept {
  if (std::string(to).ends_with("/index.pt")) {
    const auto action = std::exchange(before_replacement, nullptr);
    if (action) action(from);
  }
  return ::renameat(AT_FDCWD, from, AT_FDCWD, to);
}

extern "C" __attribute__((visibility("default"))) int flock(int descriptor,
                                                            int operation) noexcept {
  if (locks_do_nothing) return 0;
  return static_cast<int>(::syscall(SYS_flock, descriptor, operation));
}

extern "C" __attribute__((visibility("default"))) int fsync(int descriptor) {
  return disk_is_fast ? 0 : static_cast<int>(::syscall(SYS_fsync, descriptor));
}

namespace torchfuse::sharded_testing {
namespace {

using parallel::ProcessGroup;
using parallel::ShardedOptimizer;

void save_step(const ShardedFolder& folder, int step) {
  save_sharded_checkpoint(folder.path(), Checkpoint().value("step", step));
}

std::int64_t step_in(const ShardedFolder& folder) {
  return load_sharded_checkpoint(folder.path(), Checkpoint()).at("step").toInt();
}

/// Holds the lock of a folder, if there is none.
class Lock {
 public:
  explicit Lock(const ShardedFolder& folder)
      : descriptor_(::open(folder.path().c_str(), O_RDONLY | O_CLOEXEC)),
        is_taken_(::flock(descriptor_, LOCK_EX | LOCK_NB) == 0) {}
  ~Lock() { ::close(descriptor_); }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  bool is_taken() const { return is_taken_; }

 private:
  int descriptor_;
  bool is_taken_;
};

TEST(ShardedCheckpointSaves, AProcessThatIsForkedMeanwhileDoesNotKeepTheLock) {
  const ShardedFolder folder;
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  pid_t child = -1;
  before_replacement = [&](const char*) {
    EXPECT_FALSE(Lock(folder).is_taken());
    child = ::fork();
    if (child == 0) {
      char byte = 0;
      ::close(ends[1]);
      ::_exit(static_cast<int>(::read(ends[0], &byte, 1)));  // until the parent closes its end
    }
  };
  save_step(folder, 1);
  EXPECT_TRUE(Lock(folder).is_taken());
  ::close(ends[1]);
  ::close(ends[0]);
  ASSERT_GT(child, 0);
  EXPECT_EQ(::waitpid(child, nullptr, 0), child);
}

TEST(ShardedCheckpointSaves, ALockThatAnotherProgramKeepsIsAnErrorOfAllRanks) {
  const ShardedFolder folder;
  save_step(folder, 1);
  const auto files = folder.files();
  const auto save_on_ranks = [&] {
    return on_ranks(
        2,
        [&](ProcessGroup& group) {
          ShardedOptimizer<optim::FusedAdam> optimizer(sharded_params(), {}, group);
          save_sharded_checkpoint(folder.path(),
                                  Checkpoint().optimizer(optimizer).value("step", 2).group(group));
        },
        std::chrono::seconds(12));
  };
  disk_is_fast = true;
  {
    const Lock lock(folder);
    ASSERT_TRUE(lock.is_taken());
    // Half of the group's timeout: the other rank waits meanwhile.
    for (const std::string& error : save_on_ranks()) {
      EXPECT_EQ(error, "save_sharded_checkpoint: expected the lock of " + folder.path() +
                           " within 6 s, got none: another program holds it. Wait for its save to "
                           "end, or end it.");
    }
  }
  EXPECT_EQ(folder.files(), files);
  EXPECT_EQ(step_in(folder), 1);
  for (const std::string& error : save_on_ranks()) EXPECT_EQ(error, "");
  disk_is_fast = false;
}

TEST(ShardedCheckpointSaves, WithoutLocksTheLastOneCounts) {
  const ShardedFolder folder;
  save_step(folder, 1);
  locks_do_nothing = true;
  before_replacement = [&](const char*) { save_step(folder, 2); };
  save_step(folder, 3);
  EXPECT_EQ(step_in(folder), 3);
  EXPECT_EQ(folder.files().size(), 3U);  // those of 2 lie about
  locks_do_nothing = false;
  save_step(folder, 4);
  EXPECT_EQ(step_in(folder), 4);
}

TEST(ShardedCheckpointSaves, AnIndexThatAnotherProgramRemovesWhileItIsWritten) {
  const ShardedFolder folder;
  save_step(folder, 1);
  const auto files = folder.files();
  std::string removed;
  before_replacement = [&](const char* temporary) {
    removed = temporary;
    ::unlink(temporary);
  };
  try {
    save_step(folder, 2);
    FAIL() << "saved";
  } catch (const c10::Error& error) {
    EXPECT_EQ(error.what_without_backtrace(),
              "save_sharded_checkpoint: could not replace " + (folder / "index.pt") +
                  ": another program, as a save into the same folder does, has removed " + removed +
                  " meanwhile. The file is as it was.");
  }
  EXPECT_EQ(folder.files(), files);
  EXPECT_EQ(step_in(folder), 1);
}

TEST(ShardedCheckpointSaves, AFolderThatCannotBeMade) {
  const ShardedFolder folder;
  try {
    save_sharded_checkpoint(folder / "none/of", Checkpoint());
    FAIL() << "saved";
  } catch (const c10::Error& error) {
    EXPECT_EQ(error.what_without_backtrace(),
              "save_sharded_checkpoint: could not make the folder " + (folder / "none/of") +
                  ": No such file or directory. Name one in a folder that exists and may be "
                  "written.");
  }
}

}  // namespace
}  // namespace torchfuse::sharded_testing
