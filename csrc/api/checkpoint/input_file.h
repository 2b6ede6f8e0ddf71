// SPDX-License-Identifier: BSD-3-Clause
// A file with random access.
#pragma once

#include <c10/util/Exception.h>
#include <caffe2/serialize/read_adapter_interface.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>

namespace torchfuse::checkpoint {

/// A file that is opened once, so that all reads see the same contents even if `path` is replaced
/// meanwhile.
class InputFile final : public caffe2::serialize::ReadAdapterInterface {
 public:
  /// @param caller name of the caller, for error messages.
  /// @throws c10::ValueError naming a path that does not exist or is not a file, and c10::Error if
  ///   opening fails.
  InputFile(std::string caller, std::string path);
  ~InputFile() override;
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  std::size_t size() const override { return size_; }
  /// Reads `count` bytes at offset `place`, fewer at the end of the file. Does not throw, because
  /// torch's container reader would report an I/O error as damage; check() reports errors.
  /// @returns how many bytes were read.
  std::size_t read(std::uint64_t place, void* target, std::size_t count,
                   const char* what = "") const override;
  /// Throws c10::Error if an earlier read() failed.
  void check() const;

  /// Calls `action`, which reads the file. An exception becomes an error that the file is not
  /// `expected`, unless it is a c10::ValueError, a read error or out of memory.
  /// @param expected "a whole file, got a damaged one".
  template <class Action>
  auto whole(const char* expected, const Action& action, const char* remedy = "") const {
    try {
      return action();
    } catch (const c10::ValueError&) {
      throw;
    } catch (const std::exception& reason) {
      refuse(expected, reason, remedy);
    }
  }

 private:
  [[noreturn]] void refuse(const char* expected, const std::exception& reason,
                           const char* remedy) const;

  std::string caller_;
  std::string path_;
  std::size_t size_ = 0;
  int descriptor_ = -1;
  mutable int error_ = 0;
};

}  // namespace torchfuse::checkpoint
