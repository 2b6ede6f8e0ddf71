// SPDX-License-Identifier: BSD-3-Clause
// A save that dies at a chosen place, started by tests/python/parallel/test_sharded_files.py:
//
//   torchfuse_programs dying CALL FOLDER
//
// goes on from the sharded checkpoint in FOLDER, if there is one, makes a step and saves it. The
// process is killed before the CALL-th of the calls below that saving makes; 0: it is not killed.
//
//   torchfuse_programs dying CALL FOLDER error
//
// goes on: the call fails, as on a disk with errors.
#include <fcntl.h>
#include <sys/syscall.h>
#include <torch/torch.h>
#include <torchfuse/checkpoint.h>
#include <torchfuse/optim/fused_adam.h>
#include <torchfuse/parallel/process_group.h>
#include <torchfuse/parallel/sharded_optimizer.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "../programs.h"

namespace dying_program {
namespace {

int calls_left = 0;
bool dies = true;

/// Whether a call has to fail; dies where that is wanted instead.
bool fails() {
  if (calls_left == 0 || --calls_left > 0) return false;
  if (dies) std::raise(SIGKILL);
  errno = EIO;
  return true;
}

}  // namespace
}  // namespace dying_program

// The library calls these in the place of those of libc.
#pragma GCC visibility push(default)
extern "C" int fsync(int descriptor) {
  if (dying_program::fails()) return -1;
  return static_cast<int>(::syscall(SYS_fsync, descriptor));
}
extern "C" int rename(const char* from, const char* to) noexcept {
  if (dying_program::fails()) return -1;
  return static_cast<int>(::syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}
extern "C" int unlink(const char* path) noexcept {
  if (dying_program::fails()) return -1;
  return static_cast<int>(::syscall(SYS_unlinkat, AT_FDCWD, path, 0));
}
#pragma GCC visibility pop

namespace dying_program {

void start(const Arguments& arguments) {
  const std::string& folder = arguments.at(1);
  const auto group = torchfuse::parallel::init_process_group(
      c10::make_intrusive<c10d::HashStore>(),
      torchfuse::parallel::ProcessGroupOptions().backend("gloo").rank(0).world_size(1));
  const std::vector<torch::Tensor> params{torch::zeros({100}, torch::requires_grad())};
  torchfuse::parallel::ShardedOptimizer<torchfuse::optim::FusedAdam> optimizer(
      params, torchfuse::optim::FusedAdamOptions(0.01), group);
  auto checkpoint = torchfuse::Checkpoint().optimizer(optimizer).group(group);
  std::int64_t step = 1;
  if (std::filesystem::exists(folder + "/index.pt")) {
    step = 1 + torchfuse::load_sharded_checkpoint(folder, checkpoint).at("step").toInt();
  }
  params[0].mutable_grad() = torch::ones({100});
  optimizer.step();
  dies = arguments.size() == 2;
  calls_left = std::stoi(arguments.at(0));
  torchfuse::save_sharded_checkpoint(folder, checkpoint.value("step", step));
  calls_left = 0;
}

}  // namespace dying_program
