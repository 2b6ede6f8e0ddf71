// SPDX-License-Identifier: BSD-3-Clause
// The header of a safetensors file.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace torchfuse::checkpoint {

/// Maximum header size that readers of the format accept.
inline constexpr std::uint64_t kMostHeaderBytes = 100'000'000;

struct TensorEntry {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  ///< first byte, counted from the end of the header
  std::uint64_t end = 0;    ///< one past the last byte
};

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;
  std::map<std::string, std::string> metadata;
};

/// Returns the format's name for a dtype, or `nullopt` if the format does not support it.
std::optional<std::string> dtype_name(c10::ScalarType dtype);

/// Returns the header as JSON.
std::string to_json(const SafetensorsHeader& header);

/// Parses a header. The result's tensors are in file order.
/// @param size total size of all tensors in bytes; each byte must belong to one tensor.
/// @throws c10::Error that says what is wrong with the text.
SafetensorsHeader parse_header(std::string_view text, std::uint64_t size);

}  // namespace torchfuse::checkpoint
