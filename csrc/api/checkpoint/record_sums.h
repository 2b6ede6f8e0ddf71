// SPDX-License-Identifier: BSD-3-Clause
// The checksums of a container's records, which torch writes and does not compare.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>

namespace torchfuse::checkpoint {

/// The CRC-32 of zip files.
std::uint32_t crc32(const void* data, std::size_t size);

/// The CRC-32s that a zip file lists, by the names of its entries without their first folder.
/// @throws c10::Error if there is no list.
std::unordered_map<std::string, std::uint32_t> listed_sums(const std::string& path);

}  // namespace torchfuse::checkpoint
