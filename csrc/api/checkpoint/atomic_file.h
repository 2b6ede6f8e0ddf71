// SPDX-License-Identifier: BSD-3-Clause
// A file that replaces another file atomically.
#pragma once

#include <cstddef>
#include <string>

namespace torchfuse::checkpoint {

/// Writes a new version of the file `path`. Until commit() returns, `path` keeps its old contents
/// and the new bytes are in `path`.tmp-<16 random digits>, in the same folder. The temporary file
/// is removed if commit() is not called or fails; only a killed process leaves a temporary file
/// behind.
class AtomicFile {
 public:
  /// @param caller name of the caller, for error messages.
  /// @param path file to replace; for a symbolic link, the link's target.
  /// @throws c10::Error naming the path if it is a folder, device, pipe or socket, or if its folder
  ///   cannot be written.
  AtomicFile(std::string caller, const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  /// Appends bytes. Does not throw, because torch's container writer terminates the process if it
  /// cannot finish a file; check() reports errors.
  void write(const void* data, std::size_t size) noexcept;
  /// Throws if an earlier write() failed.
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
