// SPDX-License-Identifier: BSD-3-Clause
// A file that replaces another in one step.
#pragma once

#include <cstddef>
#include <string>

namespace torchfuse::checkpoint {

/// What replaces the file `path` when it is complete. Until commit() returns, `path` holds what it
/// held before; the new bytes are in `path`.tmp-<16 random digits>, in the same folder. That file
/// is removed if commit() is not called or fails; only a killed process leaves one behind.
class AtomicFile {
 public:
  /// @param caller name of the caller, for error messages.
  /// @param path file to replace; of a symbolic link, the file that it points to.
  /// @throws c10::Error naming the path if it is a folder, device, pipe or socket, or if its folder
  ///   cannot be written.
  AtomicFile(std::string caller, const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Appends bytes. An error is kept for check(): torch's writer of containers ends the process if
  /// it cannot end its file.
  void write(const void* data, std::size_t size) noexcept;
  /// Throws the error of an earlier write().
  void check() const;
  /// Makes the bytes durable, replaces the file, and makes the replacement durable.
  void commit();

 private:
  [[noreturn]] void fail(const char* action, int error) const;

  std::string caller_;
  std::string path_;
  std::string temporary_;
  int descriptor_ = -1;
  int error_ = 0;
};

}  // namespace torchfuse::checkpoint
