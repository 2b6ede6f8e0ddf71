// SPDX-License-Identifier: BSD-3-Clause
// Reads the JSON of a safetensors header: objects, lists, strings and whole numbers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace torchfuse::checkpoint {

/// Reads a JSON text from beginning to end. Errors name the byte offset and the expected token.
class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  /// Calls `member(key)` for each member of an object; `member` must read the value.
  template <typename Function>
  void object(Function member) {
    expect('{');
    if (take('}')) return;
    do {
      std::string key = string();
      expect(':');
      member(std::move(key));
    } while (take(','));
    expect('}');
  }

  /// Calls `element()` for each element of a list; `element` must read the element.
  template <typename Function>
  void list(Function element) {
    expect('[');
    if (take(']')) return;
    do {
      element();
    } while (take(','));
    expect(']');
  }

  std::string string();
  /// Reads a whole number from 0 to 2^63 - 1.
  std::int64_t number();
  /// Throws unless only white space follows.
  void end();

 private:
  [[noreturn]] void refuse(const std::string& expected) const;
  void skip_space();
  bool take(char sign);
  void expect(char sign);
  void append_escaped(std::string& result);
  std::uint32_t code_unit();

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace torchfuse::checkpoint
