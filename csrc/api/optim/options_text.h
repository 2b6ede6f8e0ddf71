// SPDX-License-Identifier: BSD-3-Clause
// Options as text, for messages and for comparisons between processes.
#pragma once

#include <ATen/core/ivalue.h>

#include <array>
#include <charconv>
#include <string>

namespace torchfuse::optim {

/// A value as archives hold it. Different numbers have different texts.
inline std::string text_of(const c10::IValue& value) {
  if (value.isNone()) return "none";
  if (value.isBool()) return value.toBool() ? "true" : "false";
  if (value.isInt()) return std::to_string(value.toInt());
  if (value.isString()) return value.toStringRef();
  if (value.isTuple()) {
    std::string text;
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      text += (text.empty() ? "(" : ", ") + text_of(element);
    }
    return text + ")";
  }
  std::array<char, 32> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value.toDouble());
  return {digits.data(), end.ptr};
}

}  // namespace torchfuse::optim
