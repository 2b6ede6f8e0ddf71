// SPDX-License-Identifier: BSD-3-Clause
#include "api/parallel/replicas.h"

#include <ATen/ATen.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torchfuse/missing_ranks.h>

#include <algorithm>
#include <sstream>

namespace torchfuse::parallel {

namespace {

constexpr const char* kWhat = "the comparison of their modules";

/// Rank 0's lines.
std::vector<std::string> lines_of_rank_0(const Collectives& collectives,
                                         const std::vector<std::string>& lines,
                                         const c10::Device& device) {
  std::string text = c10::Join("\n", lines);
  at::Tensor length = at::scalar_tensor(static_cast<std::int64_t>(text.size()), at::kLong);
  length = length.view(1).to(device);
  collectives.broadcast(length, kWhat);
  const auto bytes = length.item<std::int64_t>();
  text.resize(static_cast<std::size_t>(bytes));
  at::Tensor raw =
      at::from_blob(text.data(), {bytes}, at::kByte).to(device, at::kByte, false, true);
  collectives.broadcast(raw, kWhat);
  raw = raw.cpu();
  std::istringstream stream(
      std::string(reinterpret_cast<const char*>(raw.const_data_ptr<std::uint8_t>()), text.size()));
  std::vector<std::string> result;
  for (std::string line; std::getline(stream, line);) result.push_back(line);
  return result;
}

}  // namespace

std::string describe(const char* kind, const std::string& name, const at::Tensor& tensor) {
  return c10::str(kind, " '", name, "' ", c10::toString(tensor.scalar_type()), " ", tensor.sizes());
}

void check_same_on_all_ranks(const Collectives& collectives, const std::vector<std::string>& lines,
                             const c10::Device& device) {
  const std::vector<std::string> expected = lines_of_rank_0(collectives, lines, device);
  const auto [mine, theirs] =
      std::mismatch(lines.begin(), lines.end(), expected.begin(), expected.end());
  const bool differs = mine != lines.end() || theirs != expected.end();
  // Where each rank differs first, counted from 1; all ranks learn of all.
  at::Tensor firsts = at::zeros({collectives.size()}, at::kLong);
  if (differs) firsts[collectives.rank()] = theirs - expected.begin() + 1;
  firsts = firsts.to(device);
  collectives.sum(firsts, kWhat);
  firsts = firsts.cpu();
  const auto* found = firsts.const_data_ptr<std::int64_t>();
  std::vector<std::int64_t> ranks;
  for (std::int64_t rank = 0; rank < collectives.size(); ++rank) {
    if (found[rank] != 0) ranks.push_back(rank);
  }
  if (ranks.empty()) return;
  const auto line = [](const std::vector<std::string>& list, std::size_t index) {
    return index < list.size() ? list[index] : std::string("no more");
  };
  const auto index = static_cast<std::size_t>(found[differs ? collectives.rank() : ranks[0]] - 1);
  const std::string here =
      differs ? c10::str(" and this rank ", collectives.rank(), " has ", line(lines, index)) : "";
  TORCH_CHECK_VALUE(false, kDataParallel,
                    ": expected the same parameters and buffers in all ranks of group '",
                    collectives.name(), "', got others in ", rank_list(ranks), ": rank 0 has ",
                    line(expected, index), here, ". Build the same module in every rank.");
}

}  // namespace torchfuse::parallel
