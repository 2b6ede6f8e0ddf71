// SPDX-License-Identifier: BSD-3-Clause
#include "api/parallel/agreement.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <sstream>

namespace torchfuse::parallel {

namespace {

constexpr const char* kComparison = "the comparison of what they do";

/// FNV-1a: the same in every process.
std::int64_t checksum(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char each : text) {
    hash = (hash ^ static_cast<unsigned char>(each)) * 0x100000001b3;
  }
  return static_cast<std::int64_t>(hash);
}

/// Each rank's number.
std::vector<std::int64_t> gather(const Collectives& collectives, const c10::Device& device,
                                 std::int64_t mine) {
  at::Tensor all = at::zeros({collectives.size()}, at::kLong);
  all.mutable_data_ptr<std::int64_t>()[collectives.rank()] = mine;
  all = all.to(device);
  collectives.sum(all, kComparison);
  all = all.cpu();
  const auto* numbers = all.const_data_ptr<std::int64_t>();
  return {numbers, numbers + collectives.size()};
}

/// Each rank's text.
std::vector<std::string> gather(const Collectives& collectives, const c10::Device& device,
                                const std::string& mine) {
  const auto lengths = gather(collectives, device, static_cast<std::int64_t>(mine.size()));
  std::int64_t total = 0;
  std::int64_t before = 0;
  for (std::size_t rank = 0; rank < lengths.size(); ++rank) {
    if (static_cast<std::int64_t>(rank) < collectives.rank()) before += lengths[rank];
    total += lengths[rank];
  }
  at::Tensor bytes = at::zeros({total}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr<std::uint8_t>() + before, mine.data(), mine.size());
  bytes = bytes.to(device);
  collectives.sum(bytes, kComparison);
  bytes = bytes.cpu();
  std::vector<std::string> all;
  const auto* next = reinterpret_cast<const char*>(bytes.const_data_ptr<std::uint8_t>());
  for (const std::int64_t length : lengths) {
    all.emplace_back(next, static_cast<std::size_t>(length));
    next += length;
  }
  return all;
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

void check_agreement(const Collectives& collectives, const c10::Device& device, const char* caller,
                     const char* expected, const std::string& summary,
                     const std::function<std::vector<std::string>()>& lines) {
  if (collectives.size() == 1) return;
  if (collectives.agree(device, checksum(summary), kComparison)) return;
  // A newline of its own is not empty: some line differs, or one rank has more of them.
  const auto texts = gather(collectives, device, c10::Join("\n", lines()) + "\n");
  const auto other = std::find_if(texts.begin(), texts.end(),
                                  [&](const std::string& text) { return text != texts.front(); });
  TORCH_INTERNAL_ASSERT(other != texts.end(), caller, ": summaries differ where lines do not.");
  const auto first = split_lines(texts.front());
  const auto second = split_lines(*other);
  const auto [mine, theirs] =
      std::mismatch(first.begin(), first.end(), second.begin(), second.end());
  TORCH_CHECK_VALUE(false, caller, ": expected ", expected, " to be the same on all ranks, got ",
                    mine == first.end() ? "no more" : *mine, " on rank 0 and ",
                    theirs == second.end() ? "no more" : *theirs, " on rank ",
                    other - texts.begin(), ". Let every process do the same.");
}

}  // namespace torchfuse::parallel
