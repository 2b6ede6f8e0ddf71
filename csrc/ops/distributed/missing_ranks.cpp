// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/missing_ranks.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <future>
#include <memory>
#include <numeric>
#include <thread>

namespace torchfuse {

namespace {

using std::chrono::milliseconds;

/// Maximum time that a rank whose collective failed waits for the other ranks to report their own
/// failure.
constexpr milliseconds kLongestWaitForReports{10000};
/// Additional time for the store's answer, longer than a working store needs.
constexpr milliseconds kLongestAnswer{1000};
constexpr const char* kNoStore =
    "The group's store, which rank 0 or the launcher hosts, does not answer either.";

milliseconds wait_for_reports(c10d::ProcessGroup& group) {
  try {
    const auto timeout = group.getDefaultBackend()->getBackendOptions()->timeout;
    return std::min(kLongestWaitForReports, timeout);
  } catch (const c10::Error&) {
    // The backend has no options.
    return kLongestWaitForReports;
  }
}

/// Returns the ranks that do not report a failure of their collective. Such a rank has exited or is
/// stuck somewhere else.
std::vector<std::int64_t> silent_ranks(c10d::Store& store, int self, int size, milliseconds limit) {
  const std::string key = "torchfuse/failed_collective/";
  store.set(key + std::to_string(self), std::vector<std::uint8_t>{1});
  return missing_ranks(store, key, size, limit);
}

std::string describe(const std::vector<std::int64_t>& silent) {
  if (silent.empty())
    return "All ranks report a failure. Look at the message of the rank that failed first.";
  return "There is no sign of " + rank_list(silent) +
         " of the group: ended, stopped, or waiting elsewhere, because it does not call the same "
         "layers in the same order.";
}

}  // namespace

std::string rank_list(const std::vector<std::int64_t>& ranks) {
  if (ranks.empty()) return "no rank";
  return c10::str(ranks.size() == 1 ? "rank " : "ranks ", c10::Join(", ", ranks));
}

std::vector<std::int64_t> missing_ranks(c10d::Store& store, const std::string& key,
                                        std::int64_t size, std::chrono::milliseconds timeout,
                                        const std::function<void(std::int64_t)>& seen) {
  using Clock = std::chrono::steady_clock;
  TORCH_CHECK_VALUE(size >= 0, "missing_ranks: expected size to be at least 0, got ", size, ".");
  // Cap the timeout: now() plus a very large timeout would overflow.
  const auto deadline =
      Clock::now() + std::min<std::chrono::milliseconds>(timeout, std::chrono::years(1));
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

// Queries the store in a separate thread, because the rank that has stopped may be the rank that
// hosts the store.
std::string describe_missing_ranks(c10d::ProcessGroup& group) {
  const auto store = group.getStore();
  if (!store) return "The group has no store to ask the other ranks through.";
  const milliseconds limit = wait_for_reports(group);
  const auto answer = std::make_shared<std::promise<std::string>>();
  auto answered = answer->get_future();
  std::thread([answer, store, limit, self = group.getRank(), size = group.getSize()] {
    try {
      answer->set_value(describe(silent_ranks(*store, self, size, limit)));
    } catch (const std::exception&) {
      answer->set_value(kNoStore);
    }
  }).detach();
  return answered.wait_for(limit + kLongestAnswer) == std::future_status::ready ? answered.get()
                                                                                : kNoStore;
}

}  // namespace torchfuse
