// SPDX-License-Identifier: BSD-3-Clause
// CRC-32s of a container's records. torch writes the checksums but does not check them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>

#include "api/checkpoint/input_file.h"

namespace torchfuse::checkpoint {

/// Returns the CRC-32 that zip files use.
std::uint32_t crc32(const void* data, std::size_t size);

/// Returns a zip file's central directory, which the end of the file locates.
/// @throws c10::Error if the file contains none.
std::string list_of_entries(const InputFile& file);

/// Returns the CRC-32s in a central directory, by entry name without the first folder.
/// @throws c10::Error if the directory is truncated.
std::unordered_map<std::string, std::uint32_t> listed_sums(const std::string& list);

}  // namespace torchfuse::checkpoint
