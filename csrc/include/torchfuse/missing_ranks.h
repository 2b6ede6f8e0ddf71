// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <torchfuse/export.h>

namespace c10d {
class ProcessGroup;
class Store;
}  // namespace c10d

namespace torchfuse {

/// Returns a list of ranks as text: "no rank", "rank 2" or "ranks 1, 3".
TORCHFUSE_API std::string rank_list(const std::vector<std::int64_t>& ranks);

/// Waits until every rank of a group has written its key to a store, or until the timeout. Returns
/// the ranks whose keys are missing.
///
/// @param store store to which the ranks write.
/// @param key prefix of the keys: "ready/" for "ready/0", "ready/1" and so on.
/// @param size number of ranks in the group.
/// @param timeout maximum time to wait for all ranks, at most a year.
/// @param seen called once for each rank whose key is found; an exception from `seen` ends the
///   wait.
/// @throws c10::ValueError for a negative size.
/// @throws c10::DistError if the store does not answer.
TORCHFUSE_API std::vector<std::int64_t> missing_ranks(
    c10d::Store& store, const std::string& key, std::int64_t size,
    std::chrono::milliseconds timeout, const std::function<void(std::int64_t)>& seen = {});

/// Describes which ranks are missing after a collective has failed. A rank that does not report its
/// own failure through the group's store has either exited or is waiting somewhere else.
///
/// Call this function on every rank whose collective failed, because the call is the report. It
/// takes as long as the group's timeout, and at most 10 s for the reports and 1 s for a store that
/// does not answer.
TORCHFUSE_API std::string describe_missing_ranks(c10d::ProcessGroup& group);

}  // namespace torchfuse
