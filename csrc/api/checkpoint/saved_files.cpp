// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/saved_files.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <string_view>
#include <tuple>

#include "api/checkpoint/container.h"
#include "api/checkpoint/sharded_input.h"

namespace torchfuse::checkpoint {

namespace {

bool all_in(std::string_view text, const char* digits) {
  return !text.empty() && text.find_first_not_of(digits) == std::string_view::npos;
}

/// Whether it is what random_digits() returns.
bool is_random(std::string_view text) {
  return text.size() == 16 && all_in(text, "0123456789abcdef");
}

/// Whether it ends the name of a file that is being written.
bool is_temporary_end(std::string_view text) {
  return text.starts_with(".tmp-") && is_random(text.substr(5));
}

/// Whether a save, other than the one with this tag, may have made a file of this name beside its
/// index.
bool is_of_another_save(std::string_view name, const std::string& tag) {
  if (name.starts_with("index.pt")) return is_temporary_end(name.substr(8));
  const std::size_t dash = name.find('-');
  if (!name.starts_with("rank") || dash == std::string_view::npos) return false;
  const std::string_view rank = name.substr(4, dash - 4);
  const std::string_view found = name.substr(dash + 1, tag.size());
  const std::string_view end = name.substr(std::min(name.size(), dash + 1 + tag.size()));
  return found != tag && is_random(found) && all_in(rank, "0123456789") && end.starts_with(".pt") &&
         (end.size() == 3 || is_temporary_end(end.substr(3)));
}

std::set<std::string> named_by(const std::string& index) {
  std::set<std::string> names;
  try {
    const Container container(index, "OldFiles");
    const Dict sharded = container.value().toGenericDict().at("sharded").toGenericDict();
    for (const c10::IValue& each : sharded.at("files").toList()) {
      const auto& pair = each.toTupleRef().elements();
      if (pair.size() == 2) names.insert(pair[0].toStringRef());
    }
  } catch (const std::exception&) {
    // A damaged file, or one of another kind.
  }
  return names;
}

}  // namespace

std::string file_name(std::int64_t rank, const std::string& tag) {
  return "rank" + std::to_string(rank) + "-" + tag + ".pt";
}

std::optional<std::int64_t> bytes_of(const std::string& path) {
  struct stat found{};
  if (::stat(path.c_str(), &found) != 0 || !S_ISREG(found.st_mode)) return std::nullopt;
  return found.st_size;
}

std::optional<std::array<std::int64_t, 3>> identity_of(const std::string& path) {
  struct stat found{};
  if (::lstat(path.c_str(), &found) != 0) return std::nullopt;
  return std::array<std::int64_t, 3>{static_cast<std::int64_t>(found.st_ino), found.st_size,
                                     found.st_mtime};
}

OldFiles::OldFiles(const std::string& folder) : folder_(folder) {
  const std::string index = index_of(folder);
  struct stat found{};
  if (::stat(index.c_str(), &found) != 0 || !S_ISREG(found.st_mode)) return;
  time_ = found.st_mtim;
  named_ = named_by(index);
}

bool OldFiles::has(const std::string& name) const {
  if (named_.contains(name)) return true;
  struct stat found{};
  if (!time_ || ::lstat((folder_ + "/" + name).c_str(), &found) != 0) return false;
  const timespec& time = found.st_mtim;
  return std::tie(time.tv_sec, time.tv_nsec) < std::tie(time_->tv_sec, time_->tv_nsec);
}

void OldFiles::remove(const std::string& tag) const {
  DIR* const listing = ::opendir(folder_.c_str());
  if (listing == nullptr) return;
  for (const dirent* each = ::readdir(listing); each != nullptr; each = ::readdir(listing)) {
    const std::string name(each->d_name);
    if (is_of_another_save(name, tag) && has(name)) ::unlink((folder_ + "/" + name).c_str());
  }
  ::closedir(listing);
}

}  // namespace torchfuse::checkpoint
