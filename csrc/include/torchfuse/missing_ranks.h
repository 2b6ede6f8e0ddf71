// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <torchfuse/export.h>

namespace c10d {
class Store;
}  // namespace c10d

namespace torchfuse {

/// "no rank", "rank 2", "ranks 1, 3"
TORCHFUSE_API std::string rank_list(const std::vector<std::int64_t>& ranks);

/// The ranks of a group that give no sign in its store: every rank is to write a key of its own.
/// Returns as soon as all keys are there, or when the time is over, with the ranks whose keys are
/// not.
///
/// @param store where the ranks write.
/// @param key the start of their keys: "ready/", say, for "ready/0", "ready/1" and so on.
/// @param size how many ranks the group has.
/// @param timeout how long to wait for all of them, a year at most.
/// @param seen called once for each rank whose key is there; what it throws ends the wait.
/// @throws c10::ValueError for a negative size, c10::DistError if the store does not answer.
TORCHFUSE_API std::vector<std::int64_t> missing_ranks(
    c10d::Store& store, const std::string& key, std::int64_t size,
    std::chrono::milliseconds timeout, const std::function<void(std::int64_t)>& seen = {});

}  // namespace torchfuse
