// SPDX-License-Identifier: BSD-3-Clause
// The barriers at the begin and the end of a group, in its store.
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>
#include <thread>

#include "api/parallel/rendezvous.h"

namespace torchfuse::parallel {

namespace {

using Clock = std::chrono::steady_clock;

std::string key_of(std::int64_t rank) { return "terms/" + std::to_string(rank); }

/// Moves ranks that have come out of `missing`; throws if one was started on other terms.
void drop_arrived(c10d::Store& store, const RankInfo& self, const std::string& group,
                  const std::string& terms, std::vector<std::int64_t>& missing) {
  std::erase_if(missing, [&](std::int64_t rank) {
    if (!store.check({key_of(rank)})) return false;
    const std::vector<std::uint8_t> raw = store.get(key_of(rank));
    const std::string theirs(raw.begin(), raw.end());
    TORCH_CHECK(theirs == terms, kInit, ": expected all processes of group '", group,
                "' to be started alike, got ", theirs, " in rank ", rank, " and ", terms,
                " in rank ", self.rank, ".");
    return true;
  });
}

}  // namespace

void wait_for_all(c10d::Store& store, const RankInfo& self, std::chrono::milliseconds timeout,
                  const std::string& group, const std::string& terms) {
  const auto deadline = Clock::now() + timeout;
  std::vector<std::int64_t> missing(static_cast<std::size_t>(self.world_size));
  std::iota(missing.begin(), missing.end(), 0);
  const std::int64_t claims = store.add("claims/" + std::to_string(self.rank), 1);
  TORCH_CHECK(claims == 1, kInit, ": expected one process for each rank of group '", group,
              "', got ", claims, " with rank ", self.rank, ".");
  store.set(key_of(self.rank), std::vector<std::uint8_t>(terms.begin(), terms.end()));
  auto pause = std::chrono::milliseconds(1);
  for (;;) {
    drop_arrived(store, self, group, terms, missing);
    if (missing.empty()) return;
    TORCH_CHECK(Clock::now() < deadline, kInit, ": expected ", self.world_size,
                " processes to join group '", group, "' within ", to_string(timeout),
                ", got none with ", rank_list(missing),
                ". Check that all were started, with the same world size and address.");
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::milliseconds(100));
  }
}

void leave_together(c10d::Store& store, const RankInfo& self, std::chrono::milliseconds timeout,
                    const std::string& group, bool serves) {
  const auto deadline = Clock::now() + timeout;
  const auto count_reaches = [&](const char* key, std::int64_t goal, std::int64_t step) {
    std::int64_t count = store.add(key, step);
    while (count < goal && Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      count = store.add(key, 0);
    }
    return count >= goal;
  };
  try {
    const bool all = count_reaches("leaving", self.world_size, 1);
    if (!all) {
      TORCH_WARN("torchfuse::parallel::ProcessGroup: left group '", group, "' after waiting ",
                 to_string(timeout), " for the other ranks.");
    }
    // Who serves the store goes last.
    if (!serves) {
      store.add("left", 1);
    } else if (all) {
      count_reaches("left", self.world_size - 1, 0);
    }
  } catch (const std::exception& error) {
    TORCH_WARN("torchfuse::parallel::ProcessGroup: left group '", group,
               "' without waiting for the other ranks: ", message_of(error), ".");
  }
}

}  // namespace torchfuse::parallel
