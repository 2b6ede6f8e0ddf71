// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "api/message_of.h"

namespace torchfuse::checkpoint {

InputFile::InputFile(std::string caller, std::string path)
    : caller_(std::move(caller)), path_(std::move(path)) {
  struct stat found{};
  const bool exists = ::stat(path_.c_str(), &found) == 0;
  error_ = exists || errno == ENOENT ? 0 : errno;
  check();
  TORCH_CHECK_VALUE(exists, caller_, ": expected ", path_, " to be a file, got none.");
  TORCH_CHECK_VALUE(!S_ISDIR(found.st_mode), caller_, ": expected ", path_,
                    " to be a file, got a folder. Name the file in it.");
  // Check before opening: opening a pipe would wait for its writer.
  TORCH_CHECK_VALUE(S_ISREG(found.st_mode), caller_, ": expected ", path_,
                    " to be a file, got a pipe or device. Name a file.");
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor_ < 0 || ::fstat(descriptor_, &found) != 0) error_ = errno;
  check();
  size_ = static_cast<std::size_t>(found.st_size);
}

InputFile::~InputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

std::size_t InputFile::read(std::uint64_t place, void* target, std::size_t count,
                            const char* /*what*/) const {
  char* next = static_cast<char*>(target);
  std::size_t left = count;
  // A damaged file may name an offset beyond the end.
  while (left > 0 && place < size_) {
    const ssize_t got = ::pread(descriptor_, next, left, static_cast<off_t>(place));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) error_ = errno;
    if (got <= 0) break;
    next += got;
    left -= static_cast<std::size_t>(got);
    place += static_cast<std::uint64_t>(got);
  }
  return count - left;
}

void InputFile::check() const {
  TORCH_CHECK(error_ == 0, caller_, ": could not read ", path_, ": ",
              std::generic_category().message(error_), ".");
}

void InputFile::refuse(const char* expected, const std::exception& reason,
                       const char* remedy) const {
  check();
  if (is_out_of_memory(reason)) throw;
  const std::string message = message_of(reason);
  std::string line = message.substr(0, message.find('\n'));
  if (line.ends_with('.')) line.pop_back();
  TORCH_CHECK_VALUE(false, caller_, ": expected ", path_, " to be ", expected, ": ", line, ".",
                    remedy);
}

}  // namespace torchfuse::checkpoint
