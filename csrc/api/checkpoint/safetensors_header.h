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

/// The longest header that readers of the format take.
inline constexpr std::uint64_t kMostHeaderBytes = 100'000'000;

/// A tensor as the header describes it.
struct TensorEntry {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0;  ///< first byte, counted from the end of the header
  std::uint64_t end = 0;    ///< byte after the last one
};

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;
  std::map<std::string, std::string> metadata;
};

/// What the format calls a dtype; none where it has no name for it.
std::optional<std::string> dtype_name(c10::ScalarType dtype);

/// The header as JSON.
std::string to_json(const SafetensorsHeader& header);

/// The header that a text holds, its tensors in the order of their bytes.
/// @param size bytes of all tensors together, of which each must belong to one.
/// @throws c10::Error that says what is wrong with the text.
SafetensorsHeader parse_header(std::string_view text, std::uint64_t size);

}  // namespace torchfuse::checkpoint
