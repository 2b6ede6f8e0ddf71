// SPDX-License-Identifier: BSD-3-Clause
#include "ops/process_groups.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <sstream>
#include <thread>
#include <vector>

namespace torchfuse::ops {

namespace {

using std::chrono::milliseconds;

/// How long a rank whose collective failed waits for the others to say that theirs failed as well.
constexpr milliseconds kLongestWaitForReports{10000};
constexpr milliseconds kBetweenLooks{50};

milliseconds wait_for_reports(c10d::ProcessGroup& group) {
  try {
    const auto timeout = group.getDefaultBackend()->getBackendOptions()->timeout;
    return std::min(kLongestWaitForReports, timeout);
  } catch (const c10::Error&) {
    // A backend without options.
    return kLongestWaitForReports;
  }
}

std::string report_key(int rank) { return "torchfuse/failed_collective/" + std::to_string(rank); }

std::string list_of(const std::vector<int>& ranks) {
  std::ostringstream text;
  text << (ranks.size() == 1 ? "rank " : "ranks ");
  for (std::size_t i = 0; i < ranks.size(); ++i) text << (i == 0 ? "" : ", ") << ranks[i];
  return text.str();
}

/// Ranks that do not report a failure of their own: they ended, or are stuck somewhere else.
std::vector<int> silent_ranks(c10d::ProcessGroup& group, c10d::Store& store) {
  const int self = group.getRank();
  store.set(report_key(self), std::vector<std::uint8_t>{1});
  std::vector<int> silent;
  for (int rank = 0; rank < group.getSize(); ++rank) {
    if (rank != self) silent.push_back(rank);
  }
  const auto deadline = std::chrono::steady_clock::now() + wait_for_reports(group);
  while (true) {
    std::erase_if(silent, [&](int rank) { return store.check({report_key(rank)}); });
    if (silent.empty() || std::chrono::steady_clock::now() >= deadline) return silent;
    std::this_thread::sleep_for(kBetweenLooks);
  }
}

/// What can be learnt about the ranks after a collective failed.
std::string describe_ranks(c10d::ProcessGroup& group) {
  const auto store = group.getStore();
  if (!store) return "The group has no store to ask the other ranks through.";
  try {
    const std::vector<int> silent = silent_ranks(group, *store);
    if (silent.empty()) return "All ranks report a failure; the first of their messages counts.";
    return "There is no sign of " + list_of(silent) +
           ": ended, stopped, or waiting elsewhere, because it does not call the same layers in "
           "the same order.";
  } catch (const std::exception& error) {
    return std::string(
               "The group's store does not answer either, which rank 0 or the launcher "
               "hosts: ") +
           error.what();
  }
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

c10::intrusive_ptr<c10d::ProcessGroup> find_group(const std::string& name,
                                                  const std::string& caller) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    TORCH_CHECK(false, caller, ": expected group to name a process group that exists, got '", name,
                "'. It was destroyed, or never made: call torch.distributed.init_process_group or "
                "torchfuse::parallel::init_process_group first, and keep the group.");
  }
}

void run_collective(c10d::ProcessGroup& group, const std::string& caller,
                    const std::function<c10::intrusive_ptr<c10d::Work>()>& start) {
  std::string failure;
  try {
    start()->wait();
    return;
  } catch (const c10::Error& error) {
    failure = error.what_without_backtrace();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  TORCH_CHECK(false, caller, ": the exchange between the ", group.getSize(),
              " ranks of the process group '", group.getGroupName(), "' failed in rank ",
              group.getRank(), ". ", describe_ranks(group),
              " The backend says: ", first_line(failure));
}

}  // namespace torchfuse::ops
