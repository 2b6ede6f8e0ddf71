// SPDX-License-Identifier: BSD-3-Clause
// Keeps other saves out of a folder.
#pragma once

#include <chrono>
#include <string>

namespace torchfuse::checkpoint {

/// The lock of a folder, which Python's saves take too, while it lives. The system lets go of it
/// when the process ends. Where the file system has no locks, none is taken.
class FolderLock {
 public:
  /// @param folder to lock.
  /// @param caller begins messages.
  /// @param longest how long to wait for another program's lock.
  /// @throws c10::Error if another program holds it for longer, or if the folder cannot be opened.
  FolderLock(const std::string& folder, const std::string& caller,
             std::chrono::milliseconds longest);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int descriptor_;
};

}  // namespace torchfuse::checkpoint
