// SPDX-License-Identifier: BSD-3-Clause
#include "api/parallel/rendezvous.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torchfuse/missing_ranks.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <optional>
#include <thread>

#include "api/message_of.h"

namespace torchfuse::parallel {

namespace {

constexpr const char* kRemedy =
    "Start the program with: torchrun --no-python --nproc-per-node 2 ./program; or give rank, "
    "world_size, master_addr and master_port in ProcessGroupOptions.";

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

std::optional<std::int64_t> number(const char* name) {
  const auto text = variable(name);
  if (!text) return std::nullopt;
  std::int64_t value = 0;
  const char* end = text->data() + text->size();
  const auto [stopped, error] = std::from_chars(text->data(), end, value);
  TORCH_CHECK_VALUE(error == std::errc() && stopped == end, kInit,
                    ": expected the environment variable ", name, " to be a whole number, got '",
                    *text, "'. ", kRemedy);
  return value;
}

void check_variables(const ProcessGroupOptions& options) {
  std::vector<std::string> missing;
  const auto require = [&](const char* name, bool given) {
    if (!given && !variable(name)) missing.emplace_back(name);
  };
  require("RANK", options.rank().has_value());
  require("WORLD_SIZE", options.world_size().has_value());
  require("MASTER_ADDR", options.master_addr().has_value());
  require("MASTER_PORT", options.master_port().has_value());
  TORCH_CHECK_VALUE(missing.empty(), kInit,
                    ": expected the environment variables of torchrun, got a process without ",
                    c10::Join(", ", missing), ". ", kRemedy);
}

}  // namespace

std::string to_string(std::chrono::milliseconds duration) {
  const auto count = duration.count();
  return count % 1000 == 0 ? c10::str(count / 1000, " s") : c10::str(count, " ms");
}

RankInfo read_rank_info(const ProcessGroupOptions& options, bool read_environment) {
  TORCH_CHECK_VALUE(options.timeout().count() > 0, kInit, ": expected timeout to be positive, got ",
                    options.timeout().count(), " ms.");
  TORCH_CHECK_VALUE(options.leave_timeout().count() >= 0, kInit,
                    ": expected leave_timeout to be at least 0, got ",
                    options.leave_timeout().count(), " ms.");
  TORCH_CHECK_VALUE(!options.name().empty(), kInit, ": expected name not to be empty.");
  if (read_environment) check_variables(options);
  const auto read = [&](const char* name, const std::optional<std::int64_t>& given) {
    return given || !read_environment ? given : number(name);
  };
  const auto rank = read("RANK", options.rank());
  const auto world_size = read("WORLD_SIZE", options.world_size());
  TORCH_CHECK_VALUE(rank && world_size, kInit,
                    ": expected rank and world_size to be given along with a store.");
  TORCH_CHECK_VALUE(*world_size > 0 && *world_size <= std::numeric_limits<int>::max(), kInit,
                    ": expected the world size to be at least 1, got ", *world_size, ".");
  TORCH_CHECK_VALUE(*rank >= 0 && *rank < *world_size, kInit,
                    ": expected the rank to be at least 0 and below the world size ", *world_size,
                    ", got ", *rank, ".");
  const std::int64_t local_rank = read("LOCAL_RANK", options.local_rank()).value_or(*rank);
  TORCH_CHECK_VALUE(local_rank >= 0, kInit, ": expected the local rank to be at least 0, got ",
                    local_rank, ".");
  return {*rank, *world_size, local_rank};
}

Rendezvous join_rendezvous(const ProcessGroupOptions& options, const RankInfo& self) {
  const std::string host =
      options.master_addr() ? *options.master_addr() : *variable("MASTER_ADDR");
  const std::int64_t port = options.master_port() ? *options.master_port() : *number("MASTER_PORT");
  TORCH_CHECK_VALUE(port > 0 && port <= std::numeric_limits<std::uint16_t>::max(), kInit,
                    ": expected the port to be between 1 and 65535, got ", port, ".");
  // torchrun's agent serves the store for all ranks.
  const bool agent = variable("TORCHELASTIC_USE_AGENT_STORE") == "True" && !options.master_port();
  c10d::TCPStoreOptions store_options;
  store_options.port = static_cast<std::uint16_t>(port);
  store_options.isServer = self.rank == 0 && !agent;
  store_options.waitWorkers = false;
  store_options.timeout = options.timeout();
  c10::intrusive_ptr<c10d::Store> store;
  try {
    store = c10::make_intrusive<c10d::TCPStore>(host, store_options);
  } catch (const std::exception& error) {
    TORCH_CHECK(!store_options.isServer, kInit, ": expected port ", port, " of ", host,
                " to be free for rank 0, got: ", clause_of(error), ". Choose another MASTER_PORT.");
    TORCH_CHECK(false, kInit, ": expected ", agent ? "torchrun" : "rank 0", " to answer at ", host,
                ":", port, " within ", to_string(options.timeout()), ", got: ", clause_of(error),
                ". Check MASTER_ADDR, MASTER_PORT and the firewall, and that ",
                agent ? "torchrun" : "rank 0", " runs.");
  }
  if (agent) {
    // Processes that torchrun restarts use the same store, so add a prefix for each attempt.
    const std::string attempt = variable("TORCHELASTIC_RESTART_COUNT").value_or("0");
    store = c10::make_intrusive<c10d::PrefixStore>("torchfuse/attempt_" + attempt, store);
  }
  return {store, store_options.isServer};
}

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
