// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/json_reader.h"

#include <c10/util/Exception.h>

#include <charconv>

namespace torchfuse::checkpoint {

namespace {

void append_utf8(std::string& result, std::uint32_t code) {
  const auto append = [&](std::uint32_t byte) { result += static_cast<char>(byte); };
  if (code < 0x80) {
    append(code);
    return;
  }
  if (code < 0x800) {
    append(0xC0 | code >> 6);
  } else {
    if (code < 0x10000) {
      append(0xE0 | code >> 12);
    } else {
      append(0xF0 | code >> 18);
      append(0x80 | (code >> 12 & 0x3F));
    }
    append(0x80 | (code >> 6 & 0x3F));
  }
  append(0x80 | (code & 0x3F));
}

}  // namespace

void JsonReader::refuse(const std::string& expected) const {
  TORCH_CHECK(false, "expected ", expected, " at byte ", at_, " of the header");
}

void JsonReader::skip_space() {
  const std::size_t next = text_.find_first_not_of(" \t\r\n", at_);
  at_ = next == std::string_view::npos ? text_.size() : next;
}

bool JsonReader::take(char sign) {
  skip_space();
  if (at_ == text_.size() || text_[at_] != sign) return false;
  ++at_;
  return true;
}

void JsonReader::expect(char sign) {
  if (!take(sign)) refuse(std::string("'") + sign + "'");
}

std::int64_t JsonReader::number() {
  skip_space();
  std::int64_t value = 0;
  const char* const begin = text_.data() + at_;
  const char* const limit = text_.data() + text_.size();
  const auto [stop, error] = std::from_chars(begin, limit, value);
  const bool whole = stop == limit || (*stop != '.' && *stop != 'e' && *stop != 'E');
  if (error != std::errc() || value < 0 || !whole) refuse("a whole number from 0 to 2^63 - 1");
  at_ += static_cast<std::size_t>(stop - begin);
  return value;
}

std::uint32_t JsonReader::code_unit() {
  std::uint32_t unit = 0;
  const char* const begin = text_.data() + at_;
  if (text_.size() - at_ < 4 || std::from_chars(begin, begin + 4, unit, 16).ptr != begin + 4) {
    refuse("four hexadecimal digits");
  }
  at_ += 4;
  return unit;
}

void JsonReader::append_escaped(std::string& result) {
  static constexpr std::string_view kSigns = "\"\\/bfnrt";
  static constexpr std::string_view kMeanings = "\"\\/\b\f\n\r\t";
  const char sign = at_ < text_.size() ? text_[at_] : '\0';
  if (const std::size_t found = kSigns.find(sign); found != std::string_view::npos) {
    ++at_;
    result += kMeanings[found];
    return;
  }
  if (sign != 'u') refuse("an escaped character");
  ++at_;
  std::uint32_t code = code_unit();
  if (code >= 0xD800 && code < 0xDC00 && text_.substr(at_, 2) == "\\u") {
    at_ += 2;
    const std::uint32_t low = code_unit();
    if (low < 0xDC00 || low > 0xDFFF) refuse("the second half of a character");
    code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
  } else if (code >= 0xD800 && code <= 0xDFFF) {
    refuse("both halves of a character");
  }
  append_utf8(result, code);
}

std::string JsonReader::string() {
  expect('"');
  std::string result;
  while (true) {
    const std::size_t next = text_.find_first_of("\"\\", at_);
    if (next == std::string_view::npos) refuse("the end of a string that begins");
    result += text_.substr(at_, next - at_);
    at_ = next + 1;
    if (text_[next] == '"') return result;
    append_escaped(result);
  }
}

void JsonReader::end() {
  skip_space();
  if (at_ != text_.size()) refuse("the end");
}

}  // namespace torchfuse::checkpoint
