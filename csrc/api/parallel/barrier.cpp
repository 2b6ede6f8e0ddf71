// SPDX-License-Identifier: BSD-3-Clause
// Barriers for joining and leaving a group, built on the group's store.
#include <c10/util/Exception.h>
#include <torchfuse/missing_ranks.h>

#include <algorithm>
#include <thread>

#include "api/message_of.h"
#include "api/parallel/rendezvous.h"

namespace torchfuse::parallel {

void wait_for_all(c10d::Store& store, const RankInfo& self, std::chrono::milliseconds timeout,
                  const std::string& group, const std::string& terms) {
  const std::string key = "terms/";
  const std::int64_t claims = store.add("claims/" + std::to_string(self.rank), 1);
  TORCH_CHECK(
      claims == 1, kInit, ": expected one process for each rank of group '", group, "', got ",
      claims, " with rank ", self.rank,
      ". Give each process its own rank. If torchrun restarts processes on several machines, "
      "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.");
  store.set(key + std::to_string(self.rank), std::vector<std::uint8_t>(terms.begin(), terms.end()));
  const auto check_terms = [&](std::int64_t rank) {
    const std::vector<std::uint8_t> raw = store.get(key + std::to_string(rank));
    const std::string theirs(raw.begin(), raw.end());
    TORCH_CHECK(theirs == terms, kInit, ": expected all processes of group '", group,
                "' to pass the same arguments, got ", theirs, " in rank ", rank, " and ", terms,
                " in rank ", self.rank, ".");
  };
  const auto missing = missing_ranks(store, key, self.world_size, timeout, check_terms);
  TORCH_CHECK(missing.empty(), kInit, ": expected ", self.world_size, " processes to join group '",
              group, "' within ", to_string(timeout), ", got none with ", rank_list(missing),
              ". Check that all processes were started, with the same world size and address.");
}

void leave_after_all_ranks(c10d::Store& store, const RankInfo& self,
                           std::chrono::milliseconds timeout, const std::string& group,
                           bool serves) {
  using Clock = std::chrono::steady_clock;
  const auto deadline =
      Clock::now() + std::min<std::chrono::milliseconds>(timeout, std::chrono::years(1));
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
    // The process that serves the store leaves last.
    if (!serves) {
      store.add("left", 1);
    } else if (all) {
      count_reaches("left", self.world_size - 1, 0);
    }
  } catch (const std::exception& error) {
    TORCH_WARN("torchfuse::parallel::ProcessGroup: left group '", group,
               "' without waiting for the other ranks: ", clause_of(error), ".");
  }
}

}  // namespace torchfuse::parallel
