// SPDX-License-Identifier: BSD-3-Clause
// The checksums of a container's records, which torch writes and does not compare.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>

#include "api/checkpoint/input_file.h"

namespace torchfuse::checkpoint {

/// The CRC-32 of zip files.
std::uint32_t crc32(const void* data, std::size_t size);

/// Returns a zip file's list of entries, its central directory. The file's end says where it is.
/// @throws c10::Error if there is none.
std::string list_of_entries(const InputFile& file);

/// The CRC-32s in a list of entries, by the names of the entries without their first folder.
/// @throws c10::Error if the list is not whole.
std::unordered_map<std::string, std::uint32_t> listed_sums(const std::string& list);

}  // namespace torchfuse::checkpoint
