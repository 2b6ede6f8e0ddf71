// SPDX-License-Identifier: BSD-3-Clause
#include "ops/distributed/process_groups.h"

#include <c10/util/Exception.h>
#include <torchfuse/missing_ranks.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace torchfuse::ops {

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

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

// The store is asked from a thread of its own: the very rank that has stopped may host it.
std::string describe_ranks(c10d::ProcessGroup& group) {
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
    // A backend may give no Work for what was not started as asynchronous, as NCCL's does since
    // torch 2.8: the collective is on the current stream, and there is nothing to wait for.
    if (const auto work = start()) work->wait();
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
