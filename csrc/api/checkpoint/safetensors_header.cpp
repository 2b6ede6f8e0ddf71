// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/safetensors_header.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <set>
#include <utility>

#include "api/checkpoint/json_reader.h"

namespace torchfuse::checkpoint {

namespace {

using c10::ScalarType;

constexpr std::array<std::pair<const char*, ScalarType>, 18> kDtypes = {{
    {"F64", ScalarType::Double},
    {"F32", ScalarType::Float},
    {"F16", ScalarType::Half},
    {"BF16", ScalarType::BFloat16},
    {"F8_E4M3", ScalarType::Float8_e4m3fn},
    {"F8_E5M2", ScalarType::Float8_e5m2},
    {"F8_E4M3FNUZ", ScalarType::Float8_e4m3fnuz},
    {"F8_E5M2FNUZ", ScalarType::Float8_e5m2fnuz},
    {"C64", ScalarType::ComplexFloat},
    {"I64", ScalarType::Long},
    {"I32", ScalarType::Int},
    {"I16", ScalarType::Short},
    {"I8", ScalarType::Char},
    {"U64", ScalarType::UInt64},
    {"U32", ScalarType::UInt32},
    {"U16", ScalarType::UInt16},
    {"U8", ScalarType::Byte},
    {"BOOL", ScalarType::Bool},
}};

ScalarType dtype_of(const std::string& name, const std::string& tensor) {
  for (const auto& [known, dtype] : kDtypes) {
    if (name == known) return dtype;
  }
  TORCH_CHECK(false, "expected '", tensor, "' to have a supported dtype, got ", name);
}

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char sign : text) {
    if (static_cast<unsigned char>(sign) < 0x20) {
      std::array<char, 7> escaped{};
      std::snprintf(escaped.data(), escaped.size(), "\\u%04x", static_cast<unsigned>(sign));
      result += escaped.data();
      continue;
    }
    if (sign == '"' || sign == '\\') result += '\\';
    result += sign;
  }
  return result + '"';
}

template <typename Numbers>
std::string json_list(const Numbers& numbers) {
  std::string result = "[";
  for (const auto number : numbers) {
    if (result.size() > 1) result += ',';
    result += std::to_string(number);
  }
  result += ']';
  return result;
}

TensorEntry parse_entry(JsonReader& json, std::string name) {
  TensorEntry entry;
  std::vector<std::uint64_t> offsets;
  std::set<std::string> keys;
  json.object([&](const std::string& key) {
    TORCH_CHECK(keys.insert(key).second, "expected '", name, "' to have one ", key, ", got two");
    if (key == "dtype") {
      entry.dtype = dtype_of(json.string(), name);
    } else if (key == "shape") {
      json.list([&] { entry.shape.push_back(json.number()); });
    } else if (key == "data_offsets") {
      json.list([&] { offsets.push_back(static_cast<std::uint64_t>(json.number())); });
    } else {
      TORCH_CHECK(false, "expected '", name, "' to have dtype, shape and data_offsets, got '", key,
                  "'");
    }
  });
  TORCH_CHECK(keys.size() == 3 && offsets.size() == 2, "expected '", name,
              "' to have a dtype, a shape and two data_offsets");
  entry.name = std::move(name);
  entry.begin = offsets[0];
  entry.end = offsets[1];
  return entry;
}

std::uint64_t byte_count(const TensorEntry& entry) {
  std::uint64_t bytes = c10::elementSize(entry.dtype);
  for (const std::int64_t size : entry.shape) {
    TORCH_CHECK(!__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(size), &bytes),
                "expected '", entry.name, "' to have fewer than 2^64 bytes");
  }
  return bytes;
}

/// Checks that each byte belongs to one tensor, so that truncated or concatenated files are errors.
void check_bytes(const std::vector<TensorEntry>& tensors, std::uint64_t size) {
  std::uint64_t next = 0;
  for (const TensorEntry& entry : tensors) {
    TORCH_CHECK(entry.begin == next && entry.end >= entry.begin, "expected '", entry.name,
                "' to begin at byte ", next, ", got ", entry.begin, " to ", entry.end);
    TORCH_CHECK(entry.end - entry.begin == byte_count(entry), "expected '", entry.name,
                "' to have ", byte_count(entry), " bytes, got ", entry.end - entry.begin);
    next = entry.end;
  }
  TORCH_CHECK(next == size, "expected ", next, " bytes of tensors, got ", size);
}

}  // namespace

std::optional<std::string> dtype_name(ScalarType dtype) {
  for (const auto& [name, known] : kDtypes) {
    if (dtype == known) return name;
  }
  return std::nullopt;
}

std::string to_json(const SafetensorsHeader& header) {
  std::string metadata;
  for (const auto& [key, text] : header.metadata) {
    metadata += (metadata.empty() ? "" : ",") + quoted(key) + ":" + quoted(text);
  }
  std::string json = "{\"__metadata__\":{" + metadata + "}";
  for (const TensorEntry& entry : header.tensors) {
    json += "," + quoted(entry.name) + ":{\"dtype\":\"" + dtype_name(entry.dtype).value() +
            "\",\"shape\":" + json_list(entry.shape) +
            ",\"data_offsets\":" + json_list(std::array{entry.begin, entry.end}) + "}";
  }
  return json + "}";
}

SafetensorsHeader parse_header(std::string_view text, std::uint64_t size) {
  SafetensorsHeader header;
  JsonReader json(text);
  std::set<std::string> names;
  json.object([&](std::string key) {
    TORCH_CHECK(names.insert(key).second, "expected '", key, "' once, got it twice");
    if (key == "__metadata__") {
      json.object([&](std::string name) { header.metadata[std::move(name)] = json.string(); });
    } else {
      header.tensors.push_back(parse_entry(json, std::move(key)));
    }
  });
  json.end();
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const TensorEntry& left, const TensorEntry& right) {
              return std::pair(left.begin, left.end) < std::pair(right.begin, right.end);
            });
  check_bytes(header.tensors, size);
  return header;
}

}  // namespace torchfuse::checkpoint
