// SPDX-License-Identifier: BSD-3-Clause
#include "api/parallel/agreement.h"

#include <ATen/ATen.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <sstream>

namespace torchfuse::parallel {

namespace {

constexpr const char* kComparison = "the comparison of their calls";

/// FNV-1a: the same in every process.
std::int64_t checksum(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char each : text) {
    hash = (hash ^ static_cast<unsigned char>(each)) * 0x100000001b3;
  }
  return static_cast<std::int64_t>(hash);
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

std::vector<std::string> gather_texts(const Collectives& collectives, const c10::Device& device,
                                      const std::string& mine, const std::string& what) {
  const std::int64_t ranks = collectives.size();
  const auto length = static_cast<std::int64_t>(mine.size());
  at::Tensor lengths = at::empty({ranks}, at::TensorOptions(at::kLong).device(device));
  collectives.all_gather(lengths, at::full({1}, length, lengths.options()), what);
  lengths = lengths.cpu();
  const std::int64_t longest = lengths.max().item<std::int64_t>();
  std::vector<std::string> texts(static_cast<std::size_t>(ranks));
  if (longest == 0) return texts;
  at::Tensor own = at::zeros({longest}, at::kByte);
  std::memcpy(own.mutable_data_ptr(), mine.data(), mine.size());
  at::Tensor all = at::empty({ranks, longest}, at::TensorOptions(at::kByte).device(device));
  collectives.all_gather(all, own.to(device), what);
  all = all.cpu();
  const auto* next = static_cast<const char*>(all.const_data_ptr());
  for (std::int64_t rank = 0; rank < ranks; ++rank, next += longest) {
    const auto size = static_cast<std::size_t>(lengths.const_data_ptr<std::int64_t>()[rank]);
    texts[static_cast<std::size_t>(rank)].assign(next, size);
  }
  return texts;
}

void check_agreement(const Collectives& collectives, const c10::Device& device,
                     const char* expected, const std::string& summary,
                     const std::function<std::vector<std::string>()>& lines) {
  if (collectives.size() == 1) return;
  if (collectives.agree(device, checksum(summary), kComparison)) return;
  std::string text;
  for (const std::string& line : lines()) text += line + "\n";
  const auto texts = gather_texts(collectives, device, text, kComparison);
  const auto other = std::find_if(texts.begin(), texts.end(),
                                  [&](const std::string& text) { return text != texts.front(); });
  TORCH_INTERNAL_ASSERT(other != texts.end(), "summaries differ where lines do not.");
  const auto first = split_lines(texts.front());
  const auto second = split_lines(*other);
  const auto [mine, theirs] =
      std::mismatch(first.begin(), first.end(), second.begin(), second.end());
  TORCH_CHECK_VALUE(
      false, collectives.who(), ": expected ", expected, " to be the same on all ranks, got ",
      mine == first.end() ? "nothing more" : *mine, " on rank 0 and ",
      theirs == second.end() ? "nothing more" : *theirs, " on rank ", other - texts.begin(),
      ". Use the same model, options and calls in every process.");
}

}  // namespace torchfuse::parallel
