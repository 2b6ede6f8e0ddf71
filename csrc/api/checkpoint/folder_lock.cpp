// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/folder_lock.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <thread>

namespace torchfuse::checkpoint {

namespace {

/// Whether no other program holds the lock any more before that time has passed.
bool is_taken_within(int descriptor, std::chrono::milliseconds longest) {
  const auto end = std::chrono::steady_clock::now() + longest;
  while (::flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) return true;  // a file system without locks
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return true;
}

}  // namespace

FolderLock::FolderLock(const std::string& folder, const std::string& caller,
                       std::chrono::milliseconds longest)
    : descriptor_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  TORCH_CHECK(descriptor_ >= 0, caller, ": could not open the folder ", folder,
              " for its lock: ", std::generic_category().message(errno),
              ". Allow reading it, and let no other program remove it.");
  if (is_taken_within(descriptor_, longest)) return;
  ::close(descriptor_);
  TORCH_CHECK(false, caller, ": expected the lock of ", folder, " within ",
              static_cast<double>(longest.count()) / 1000.0,
              " s, got none: another program holds it. Wait for its save to end, or end it.");
}

FolderLock::~FolderLock() {
  // A process that was forked meanwhile has the descriptor too: closing it is not enough.
  ::flock(descriptor_, LOCK_UN);
  ::close(descriptor_);
}

}  // namespace torchfuse::checkpoint
