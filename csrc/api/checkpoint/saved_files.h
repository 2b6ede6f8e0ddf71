// SPDX-License-Identifier: BSD-3-Clause
// The files of sharded checkpoints in a folder: see Note [Sharded checkpoints].
#pragma once

#include <sys/stat.h>

#include <array>
#include <cstdint>
#include <optional>
#include <set>
#include <string>

namespace torchfuse::checkpoint {

/// The name of a rank's file. A tag of 16 hexadecimal digits is of one save.
std::string file_name(std::int64_t rank, const std::string& tag);

/// Bytes of a file; none: there is no such file.
std::optional<std::int64_t> bytes_of(const std::string& path);

/// What another file in its place does not share with a file; none: there is no such file.
std::optional<std::array<std::int64_t, 3>> identity_of(const std::string& path);

/// What is of no use any more when a save has replaced an index: the files that the old one names,
/// and what saves before it have left behind. Files that are newer may be those of another save,
/// which where locks do not work replaces the index at the same time.
class OldFiles {
 public:
  /// Reads the index that a save is about to replace, if there is one.
  explicit OldFiles(const std::string& folder);
  /// Removes them as far as the system lets it, but for those with this tag.
  void remove(const std::string& tag) const;

 private:
  bool has(const std::string& name) const;

  std::string folder_;
  std::set<std::string> named_;
  std::optional<timespec> time_;  ///< of the index
};

}  // namespace torchfuse::checkpoint
