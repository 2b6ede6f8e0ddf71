// SPDX-License-Identifier: BSD-3-Clause
#include "api/checkpoint/record_sums.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace torchfuse::checkpoint {

namespace {

using CrcTables = std::array<std::array<std::uint32_t, 256>, 8>;

/// Table k advances the CRC by one byte that is followed by k more bytes.
constexpr CrcTables make_crc_tables() {
  CrcTables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0xedb88320U & (~(crc & 1U) + 1U));
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < tables.size(); ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xffU];
    }
  }
  return tables;
}

std::string part_of(const InputFile& file, std::uint64_t at, std::uint64_t count) {
  TORCH_CHECK(at <= file.size() && count <= file.size() - at, "its list of records is not whole");
  std::string bytes(count, '\0');
  TORCH_CHECK(file.read(at, bytes.data(), count) == count, "its list of records is not whole");
  return bytes;
}

template <class Number>
Number number_at(const std::string& bytes, std::size_t at) {
  TORCH_CHECK(at + sizeof(Number) <= bytes.size(), "its list of records is not whole");
  Number number;
  std::memcpy(&number, bytes.data() + at, sizeof number);
  return number;
}

}  // namespace

std::string list_of_entries(const InputFile& file) {
  constexpr std::uint64_t kEnd = 22;
  constexpr std::uint64_t kLocator = 20;
  constexpr std::uint64_t kEnd64 = 56;
  const std::uint64_t tail_size = std::min<std::uint64_t>(file.size(), kEnd + 0xffff + kLocator);
  const std::string tail = part_of(file, file.size() - tail_size, tail_size);
  const std::size_t end = tail.rfind("PK\x05\x06");
  TORCH_CHECK(end != std::string::npos, "it has no list of records");
  if (end >= kLocator && tail.compare(end - kLocator, 4, "PK\x06\x07") == 0) {
    const auto at = number_at<std::uint64_t>(tail, end - kLocator + 8);
    const std::string end64 = part_of(file, at, kEnd64);
    return part_of(file, number_at<std::uint64_t>(end64, 48), number_at<std::uint64_t>(end64, 40));
  }
  return part_of(file, number_at<std::uint32_t>(tail, end + 16),
                 number_at<std::uint32_t>(tail, end + 12));
}

std::uint32_t crc32(const void* data, std::size_t size) {
  static constexpr CrcTables kTables = make_crc_tables();
  const auto* next = static_cast<const unsigned char*>(data);
  std::uint32_t crc = 0xffffffffU;
  for (; size >= 8; size -= 8, next += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, next, sizeof word);
    word ^= crc;
    crc = 0;
    for (std::size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][(word >> (8 * k)) & 0xffU];
  }
  for (; size > 0; --size) crc = (crc >> 8) ^ kTables[0][(crc ^ *next++) & 0xffU];
  return ~crc;
}

std::unordered_map<std::string, std::uint32_t> listed_sums(const std::string& list) {
  constexpr std::size_t kHeader = 46;
  std::unordered_map<std::string, std::uint32_t> sums;
  for (std::size_t at = 0; at + kHeader <= list.size();) {
    const std::size_t name_size = number_at<std::uint16_t>(list, at + 28);
    const std::string name = list.substr(at + kHeader, name_size);
    sums[name.substr(name.find('/') + 1)] = number_at<std::uint32_t>(list, at + 16);
    at += kHeader + name_size + number_at<std::uint16_t>(list, at + 30) +
          number_at<std::uint16_t>(list, at + 32);
  }
  return sums;
}

}  // namespace torchfuse::checkpoint
