// SPDX-License-Identifier: BSD-3-Clause
// Plain values in checkpoints (dictionaries and lists with values of any type), and lookups whose
// errors name the file and the key.
#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace torchfuse::checkpoint {

using Dict = c10::impl::GenericDict;
using List = c10::impl::GenericList;

/// Maximum nesting depth of a file's values.
inline constexpr int kMostNested = 100;

inline Dict make_dict() { return Dict(c10::AnyType::get(), c10::AnyType::get()); }
inline List make_list() { return List(c10::AnyType::get()); }

/// Returns the name of the value's type in Python.
inline std::string type_name(const c10::IValue& value) {
  if (value.isNone()) return "None";
  if (value.isBool()) return "bool";
  if (value.isInt()) return "int";
  if (value.isDouble()) return "float";
  if (value.isString()) return "str";
  if (value.isTensor()) return "Tensor";
  if (value.isTuple()) return "tuple";
  if (value.isList()) return "list";
  if (value.isGenericDict()) return "dict";
  return value.tagKind();
}

/// Returns whether bytes are UTF-8.
/// @param surrogates accept surrogates, which Python strings may contain (default false).
inline bool is_utf8(std::string_view text, bool surrogates = false) {
  constexpr std::array<std::uint32_t, 4> kLeast{0, 0x80, 0x800, 0x10000};
  for (std::size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i++]);
    const int ones = std::countl_one(lead);
    if (ones == 1 || ones > 4) return false;
    std::uint32_t code = lead & (0x7fU >> ones);
    for (int more = 1; more < ones; ++more, ++i) {
      if (i == text.size() || (text[i] & 0xc0) != 0x80) return false;
      code = (code << 6) | (text[i] & 0x3fU);
    }
    if (code > 0x10ffff || (ones > 0 && code < kLeast[ones - 1])) return false;
    if (!surrogates && code >= 0xd800 && code <= 0xdfff) return false;
  }
  return true;
}

/// Returns a key for an error message. Long keys are truncated.
inline std::string key_name(const c10::IValue& key) {
  constexpr std::size_t kMost = 200;
  if (key.isString()) {
    const std::string& name = key.toStringRef();
    if (!is_utf8(name)) return "text with halves of characters";
    return "'" + name.substr(0, kMost) + (name.size() > kMost ? "...'" : "'");
  }
  return key.isInt() ? std::to_string(key.toInt()) : type_name(key);
}

/// Returns a dictionary's keys for an error message, at most `most`.
inline std::string listed(const Dict& dict, std::size_t most = 12) {
  std::string text;
  std::size_t count = 0;
  for (const auto& entry : dict) {
    if (count++ < most) text += (text.empty() ? "" : ", ") + key_name(entry.key());
  }
  if (count > most) text += " and " + std::to_string(count - most) + " more";
  return "[" + text + "]";
}

/// Returns the dictionary `value`. `where` is "load_checkpoint: expected <file> to hold <key>".
inline Dict as_dict(const c10::IValue& value, const std::string& where) {
  TORCH_CHECK_VALUE(value.isGenericDict(), where, " as a dict, got a ", type_name(value), ".");
  return value.toGenericDict();
}

/// Returns the value of `key`. `where` is "load_checkpoint: expected <file>'s <part>".
inline c10::IValue entry(const Dict& dict, const c10::IValue& key, const std::string& where) {
  const auto found = dict.find(key);
  TORCH_CHECK_VALUE(found != dict.end(), where, " to hold ", key_name(key), ", got ", listed(dict),
                    ".");
  return found->value();
}

}  // namespace torchfuse::checkpoint
