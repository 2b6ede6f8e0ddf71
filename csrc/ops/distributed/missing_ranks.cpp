// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/missing_ranks.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <numeric>
#include <thread>

#include "ops/distributed/deadline.h"

namespace torchfuse {

std::string rank_list(const std::vector<std::int64_t>& ranks) {
  if (ranks.empty()) return "no rank";
  return c10::str(ranks.size() == 1 ? "rank " : "ranks ", c10::Join(", ", ranks));
}

std::vector<std::int64_t> missing_ranks(c10d::Store& store, const std::string& key,
                                        std::int64_t size, std::chrono::milliseconds timeout,
                                        const std::function<void(std::int64_t)>& seen) {
  using Clock = std::chrono::steady_clock;
  TORCH_CHECK_VALUE(size >= 0, "missing_ranks: expected size to be at least 0, got ", size, ".");
  const auto deadline = ops::deadline_after(timeout);
  std::vector<std::int64_t> missing(static_cast<std::size_t>(size));
  std::iota(missing.begin(), missing.end(), 0);
  auto pause = std::chrono::milliseconds(1);
  for (;;) {
    std::erase_if(missing, [&](std::int64_t rank) {
      if (!store.check({key + std::to_string(rank)})) return false;
      if (seen) seen(rank);
      return true;
    });
    if (missing.empty() || Clock::now() >= deadline) return missing;
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::milliseconds(100));
  }
}

}  // namespace torchfuse
