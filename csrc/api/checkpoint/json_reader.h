// SPDX-License-Identifier: BSD-3-Clause
// Reads the JSON of a safetensors header: objects, lists, strings and whole numbers.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace torchfuse::checkpoint {

/// Reads one text from its beginning to its end. Errors name the byte at which the text is not what
/// was asked for.
class JsonReader {
 public:
  explicit JsonReader(std::string_view text) : text_(text) {}

  /// Calls `member(key)` for each member of an object; it must read the member's value.
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

  /// Calls `element()` for each element of a list; it must read the element.
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
  /// A whole number from 0 to 2^63 - 1.
  std::int64_t number();
  /// Nothing but white space may follow.
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
