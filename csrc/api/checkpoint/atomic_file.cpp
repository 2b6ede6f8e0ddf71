// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/atomic_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <random>
#include <system_error>
#include <tuple>
#include <utility>

namespace torchfuse::checkpoint {

namespace {

// Note [No std::filesystem]
// libtorch.so exports parts of std::filesystem that call functions missing from libtorch.so.

/// Returns the file that a chain of symbolic links points to, even if the file does not exist yet.
std::string target_of(const std::string& path) {
  constexpr int kMostLinks = 40;  // the kernel's limit
  std::string target = path;
  for (int links = 0; links < kMostLinks; ++links) {
    std::string link(PATH_MAX, '\0');
    const ssize_t size = ::readlink(target.c_str(), link.data(), link.size());
    if (size < 0) return target;
    link.resize(static_cast<std::size_t>(size));
    const std::size_t slash = target.rfind('/');
    const bool is_relative = link.front() != '/' && slash != std::string::npos;
    target = is_relative ? target.substr(0, slash + 1) + link : link;
  }
  return path;  // a cycle of links, which cannot be opened
}

/// Returns 16 random hexadecimal digits, unique among all processes on all machines.
std::string random_digits() {
  std::random_device device;
  const std::uint64_t number = (std::uint64_t{device()} << 32) | device();
  std::string digits(17, '\0');
  std::snprintf(digits.data(), digits.size(), "%016llx", static_cast<unsigned long long>(number));
  digits.resize(16);
  return digits;
}

/// Makes a new name in the folder of `path` durable. Returns an error number, or 0.
int sync_folder(const std::string& path) {
  const std::size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return errno;
  // Some file systems do not support fsync on folders.
  const int error = ::fsync(descriptor) != 0 && errno != EINVAL ? errno : 0;
  ::close(descriptor);
  return error;
}

}  // namespace

AtomicFile::AtomicFile(std::string caller, const std::string& path)
    : caller_(std::move(caller)), path_(target_of(path)) {
  TORCH_CHECK_VALUE(!path.empty(), caller_, ": expected path to name a file, got an empty path.");
  struct stat replaced{};
  const bool replaces = ::stat(path_.c_str(), &replaced) == 0;
  TORCH_CHECK_VALUE(!replaces || !S_ISDIR(replaced.st_mode), caller_, ": expected ", path,
                    " to be a file, got a folder. Name a file in it.");
  TORCH_CHECK_VALUE(!replaces || S_ISREG(replaced.st_mode), caller_, ": expected ", path,
                    " to be a file or a new name, got a device, pipe or socket, which a file would "
                    "replace. Name a file.");
  temporary_ = path_ + ".tmp-" + random_digits();
  descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor_ < 0) fail("create a file in the folder of", errno);
  // The new file keeps the replaced file's permissions.
  if (replaces) std::ignore = ::fchmod(descriptor_, replaced.st_mode & 0777U);
}

AtomicFile::~AtomicFile() {
  if (temporary_.empty()) return;
  if (descriptor_ >= 0) ::close(descriptor_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, std::size_t size) noexcept {
  const char* next = static_cast<const char*>(data);
  while (size > 0 && error_ == 0) {
    const ssize_t written = ::write(descriptor_, next, size);
    if (written < 0) {
      if (errno != EINTR) error_ = errno;
    } else if (written == 0) {
      error_ = ENOSPC;
    } else {
      next += written;
      size -= static_cast<std::size_t>(written);
    }
  }
}

void AtomicFile::check() const {
  if (error_ != 0) fail("write", error_);
}

void AtomicFile::commit() {
  check();
  if (::fsync(descriptor_) != 0) fail("write", errno);
  const int descriptor = std::exchange(descriptor_, -1);
  if (::close(descriptor) != 0) fail("write", errno);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    TORCH_CHECK(errno != ENOENT, caller_, ": could not replace ", path_,
                ": another program has removed ", temporary_, ". An existing file is unchanged.");
    fail("replace", errno);
  }
  temporary_.clear();
  const int error = sync_folder(path_);
  TORCH_CHECK(error == 0, caller_, ": replaced ", path_,
              ", but its folder was not synced: ", std::generic_category().message(error),
              ". After a power failure the path may hold the previous file.");
}

void AtomicFile::fail(const char* action, int error) const {
  TORCH_CHECK(false, caller_, ": could not ", action, " ", path_, ": ",
              std::generic_category().message(error), ". An existing file is unchanged.");
}

}  // namespace torchfuse::checkpoint
