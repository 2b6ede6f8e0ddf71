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

/// How long a rank whose collective failed waits for the others to say that theirs failed as well.
constexpr milliseconds kLongestWaitForReports{10000};
/// Longer than the store takes to answer, if it does.
constexpr milliseconds kLongestAnswer{1000};
constexpr const char* kNoStore =
    "The group's store does not answer either, which rank 0 or the launcher hosts.";

milliseconds wait_for_reports(c10d::ProcessGroup& group) {
  try {
    const auto timeout = group.getDefaultBackend()->getBackendOptions()->timeout;
    return std::min(kLongestWaitForReports, timeout);
  } catch (const c10::Error&) {
    // A backend without options.
    return kLongestWaitForReports;
  }
}

/// Ranks that do not report a failure of their own: they ended, or are stuck somewhere else.
std::vector<std::int64_t> silent_ranks(c10d::Store& store, int self, int size, milliseconds limit) {
  const std::string key = "torchfuse/failed_collective/";
  store.set(key + std::to_string(self), std::vector<std::uint8_t>{1});
  return missing_ranks(store, key, size, limit);
}

std::string describe(const std::vector<std::int64_t>& silent) {
  if (silent.empty()) return "All ranks report a failure; the first of their messages counts.";
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
  // The sum would overflow for those who wait for ever.
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

// The store is asked from a thread of its own: the very rank that has stopped may host it.
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
