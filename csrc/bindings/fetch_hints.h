// SPDX-License-Identifier: BSD-3-Clause
// What a step will read next, from what the last one read.
#pragma once

#include <Python.h>

#include <array>
#include <cstddef>
#include <vector>

namespace torchfuse::bindings {

// Note [Hints]
// The objects of ten thousand parameters do not stay in the caches between steps, and each leads to
// the next: parameter, tensor, gradient, dictionary, state. A step that follows them waits for
// memory at every one. They mostly lie where they lay in the last step, so their addresses are
// kept, and asked for some parameters ahead. A hint is never followed: whatever lies there now, a
// prefetch reads no value and faults on no address.
class FetchHints {
 public:
  /// The cache lines of one parameter.
  class Lines {
   public:
    void add(const void* address) {
      if (count_ < kMost) addresses_[count_++] = address;
    }

    /// The dictionary and its header, index table and four entries.
    void add_dict(PyObject* dict) {
      add(dict);
      const auto* keys =
          reinterpret_cast<const char*>(reinterpret_cast<PyDictObject*>(dict)->ma_keys);
      for (std::size_t line = 0; line < kDictLines; ++line) add(keys + kLineBytes * line);
    }

   private:
    friend class FetchHints;
    static constexpr std::size_t kLineBytes = 64;
    static constexpr std::size_t kDictLines = 3;
    static constexpr std::size_t kMost = 14;

    std::array<const void*, kMost> addresses_{};
    std::size_t count_ = 0;
  };

  void resize(std::size_t params) { lines_.resize(params); }

  /// Those of a parameter, to be noted anew.
  Lines& of(std::size_t param) {
    lines_[param].count_ = 0;
    return lines_[param];
  }

  /// Asks for what is noted of a parameter that comes soon.
  void fetch(std::size_t param) const {
    if (param + kAhead >= lines_.size()) return;
    const Lines& lines = lines_[param + kAhead];
    for (std::size_t i = 0; i < lines.count_; ++i) __builtin_prefetch(lines.addresses_[i]);
  }

 private:
  static constexpr std::size_t kAhead = 12;

  std::vector<Lines> lines_;
};

}  // namespace torchfuse::bindings
