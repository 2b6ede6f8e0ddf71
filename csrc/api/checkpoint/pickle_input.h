// SPDX-License-Identifier: BSD-3-Clause
// Reads a pickle's bytes. Errors name the file.
#pragma once

#include <c10/util/Exception.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "api/checkpoint/values.h"

namespace torchfuse::checkpoint {

class PickleInput {
 public:
  /// @param where "load_checkpoint: expected <file>", for error messages.
  PickleInput(std::string_view bytes, std::string where)
      : bytes_(bytes), where_(std::move(where)) {}

  const std::string& where() const { return where_; }
  std::size_t position() const { return position_; }

  void check(bool holds, const char* what) const {
    TORCH_CHECK_VALUE(holds, where_, " to hold ", what, ", got a damaged pickle at byte ",
                      position_, ".");
  }

  std::string_view take_bytes(std::uint64_t count) {
    check(count <= bytes_.size() - position_, "a whole pickle");
    const std::string_view taken = bytes_.substr(position_, count);
    position_ += count;
    return taken;
  }

  template <class Number>
  Number take() {
    Number number;
    std::memcpy(&number, take_bytes(sizeof number).data(), sizeof number);
    return number;
  }

  std::string take_line() {
    const std::size_t end = bytes_.find('\n', position_);
    check(end != std::string_view::npos, "a whole pickle");
    std::string line = take_text(end - position_, /*surrogates=*/false);
    ++position_;
    return line;
  }

  std::string take_text(std::uint64_t size, bool surrogates = true) {
    std::string text(take_bytes(size));
    check(is_utf8(text, surrogates), "text in UTF-8");
    return text;
  }

  /// Reads a variable-length number in two's complement.
  std::int64_t take_long(std::uint64_t size) {
    check(size <= 8, "integers of 64 bits");
    const std::string_view raw = take_bytes(size);
    std::uint64_t number = !raw.empty() && (raw.back() & 0x80) != 0 ? ~std::uint64_t{0} : 0;
    std::memcpy(&number, raw.data(), raw.size());
    return static_cast<std::int64_t>(number);
  }

  /// Reads a big-endian number.
  double take_double() { return std::bit_cast<double>(__builtin_bswap64(take<std::uint64_t>())); }

 private:
  std::string_view bytes_;
  std::string where_;
  std::size_t position_ = 0;
};

}  // namespace torchfuse::checkpoint
