// SPDX-License-Identifier: BSD-3-Clause
#include "api/parallel/rendezvous.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <charconv>
#include <cstdlib>
#include <limits>
#include <optional>

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

}  // namespace torchfuse::parallel
