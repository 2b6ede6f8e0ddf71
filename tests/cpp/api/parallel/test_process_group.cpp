// SPDX-License-Identifier: BSD-3-Clause
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <torch/torch.h>
#include <torchfuse/collectives.h>
#include <torchfuse/parallel/process_group.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "parallel_testing.h"

namespace torchfuse::testing {
namespace {

using parallel::init_process_group;
using parallel::ProcessGroup;
using parallel::ProcessGroupOptions;
using namespace std::chrono_literals;

ProcessGroupOptions alone() {
  return ProcessGroupOptions().backend("gloo").rank(0).world_size(1).timeout(5s).leave_timeout(2s);
}

c10::intrusive_ptr<c10d::Store> new_store() { return c10::make_intrusive<c10d::HashStore>(); }

/// Sets torchrun's variables; takes them away in the end.
class Environment {
 public:
  explicit Environment(const std::map<std::string, std::string>& values) {
    clear();
    for (const auto& [name, value] : values) setenv(name.c_str(), value.c_str(), 1);
  }
  ~Environment() { clear(); }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  static void clear() {
    for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"}) {
      unsetenv(name);
    }
  }
};

/// A port that somebody holds, with or without answering.
class HeldPort {
 public:
  HeldPort() : socket_(socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    socklen_t length = sizeof(address);
    EXPECT_EQ(bind(socket_, reinterpret_cast<sockaddr*>(&address), length), 0);
    EXPECT_EQ(getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &length), 0);
    port = ntohs(address.sin_port);
  }
  ~HeldPort() { close(socket_); }
  HeldPort(const HeldPort&) = delete;
  HeldPort& operator=(const HeldPort&) = delete;

  void listen() const { EXPECT_EQ(::listen(socket_, 1), 0); }
  std::int64_t port = 0;

 private:
  int socket_;
};

TEST(ProcessGroup, IsRegisteredAsLongAsItLives) {
  {
    ProcessGroup group = init_process_group(new_store(), alone().name("alone"));
    EXPECT_EQ(group.rank(), 0);
    EXPECT_EQ(group.world_size(), 1);
    EXPECT_EQ(group.local_rank(), 0);
    EXPECT_EQ(group.backend(), "gloo");
    EXPECT_EQ(group.timeout(), 5s);
    EXPECT_EQ(c10d::resolve_process_group("alone").get(), group.get().get());
    const auto value = torch::ones({2});
    all_reduce_(value, "sum", {"alone"});
    group.barrier();
    ProcessGroup moved = std::move(group);
    EXPECT_TRUE(moved.is_open());
    EXPECT_EQ(moved.name(), "alone");
  }
  EXPECT_ANY_THROW(c10d::resolve_process_group("alone"));
  const auto store = new_store();
  for (int time = 0; time < 2; ++time)
    std::ignore = init_process_group(store, alone().name("alone"));
}

TEST(ProcessGroup, ABarrierMayHaveNothingToWaitFor) {
  ProcessGroup group = init_process_group(new_store(), alone());
  const auto twin = c10::make_intrusive<Twin>();
  twin->gives_work = false;
  group.get()->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, twin);
  group.barrier();
}

TEST(ProcessGroup, ClosesItsSubGroupsFirst) {
  ProcessGroup group = init_process_group(new_store(), alone());
  auto sub = group.new_group({0});
  ASSERT_TRUE(sub.has_value());
  EXPECT_EQ(sub->name(), "torchfuse/0");
  EXPECT_EQ(group.new_group({0})->name(), "torchfuse/1");
  group.close();
  EXPECT_FALSE(sub->is_open());
  EXPECT_ERROR([&] { sub->barrier(); },
               "expected group 'torchfuse/0' to be open, got one that was "
               "closed. Keep the ProcessGroup, and the one that made it");
  group.close();
}

TEST(ProcessGroup, RanksAsThreads) {
  c10d::set_thread_isolation_mode(true);
  const auto store = new_store();
  constexpr int kRanks = 3;
  std::vector<double> sums(kRanks);
  std::vector<std::string> members(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      ProcessGroup group =
          init_process_group(store, alone().name("threads").rank(rank).world_size(kRanks));
      auto value = std::vector<torch::Tensor>{torch::full({1}, rank + 1.0)};
      group.get()->getBackend(c10::kCPU)->allreduce(value)->wait();
      sums[rank] = value[0].item<double>();
      auto ends = group.new_group({2, 0});
      members[rank] = ends ? std::to_string(ends->rank()) : "no";
      if (ends) ends->barrier();
    });
  }
  for (auto& thread : threads) thread.join();
  c10d::set_thread_isolation_mode(false);
  EXPECT_EQ(sums, (std::vector<double>{6, 6, 6}));
  EXPECT_EQ(members, (std::vector<std::string>{"0", "no", "1"}));
}

TEST(ProcessGroupErrors, Variables) {
  const std::string remedy = "Start the program with: torchrun --no-python --nproc-per-node 2";
  {
    const Environment environment({{"RANK", "0"}, {"MASTER_ADDR", "localhost"}});
    const auto error = error_of([] { std::ignore = init_process_group(); });
    EXPECT_PRED_FORMAT2(::testing::IsSubstring,
                        "expected the environment variables of torchrun, got a process without "
                        "WORLD_SIZE, MASTER_PORT. ",
                        error);
    EXPECT_PRED_FORMAT2(::testing::IsSubstring, remedy, error);
  }
  const auto with = [](const std::string& name, const std::string& value) {
    return [=] {
      std::map<std::string, std::string> values{
          {"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "1"}};
      values[name] = value;
      const Environment environment(values);
      std::ignore = init_process_group(ProcessGroupOptions().backend("gloo").timeout(1s));
    };
  };
  EXPECT_ERROR(with("RANK", "two"),
               "expected the environment variable RANK to be a whole number, got 'two'. " + remedy);
  EXPECT_ERROR(with("WORLD_SIZE", "2x"), "WORLD_SIZE to be a whole number, got '2x'.");
  EXPECT_ERROR(with("WORLD_SIZE", "0"), "expected the world size to be at least 1, got 0.");
  EXPECT_ERROR(with("RANK", "2"),
               "expected the rank to be at least 0 and below the world size 2, got 2.");
  EXPECT_ERROR(with("LOCAL_RANK", "-1"), "expected the local rank to be at least 0, got -1.");
  EXPECT_ERROR(with("MASTER_PORT", "70000"),
               "expected the port to be between 1 and 65535, got 70000.");
}

TEST(ProcessGroupErrors, Options) {
  const auto join = [](const ProcessGroupOptions& options) {
    return [=] { std::ignore = init_process_group(new_store(), options); };
  };
  EXPECT_ERROR(join(alone().backend("mpi")),
               "expected backend to be \"gloo\" or \"nccl\", got \"mpi\".");
  EXPECT_ERROR(join(alone().timeout(0ms)), "expected timeout to be positive, got 0 ms.");
  EXPECT_ERROR(join(alone().leave_timeout(-1ms)), "expected leave_timeout to be at least 0");
  EXPECT_ERROR(join(alone().name("")), "expected name not to be empty.");
  EXPECT_ERROR(join(ProcessGroupOptions().backend("gloo")),
               "expected rank and world_size to be given along with a store.");
  EXPECT_ERROR([] { std::ignore = init_process_group({}, alone()); },
               "expected store to be a store, got none.");
  const ProcessGroup group = init_process_group(new_store(), alone());
  EXPECT_ERROR(join(alone()), "expected name to be that of no other group, got 'torchfuse'");
}

TEST(ProcessGroupErrors, SubGroups) {
  ProcessGroup group = init_process_group(new_store(), alone());
  EXPECT_ERROR([&] { group.new_group({}); }, "expected ranks not to be empty.");
  EXPECT_ERROR(
      [&] { group.new_group({1, 0}); },
      "expected ranks to be at least 0 and below the world size 1 of group 'torchfuse', got "
      "ranks 0, 1.");
  EXPECT_ERROR([&] { group.new_group({-1}); }, "got rank -1.");
  EXPECT_ERROR([&] { group.new_group({0, 0}); },
               "expected ranks without duplicates, got ranks 0, 0.");
}

TEST(ProcessGroupErrors, RanksThatDoNotCome) {
  const auto store = new_store();
  const auto options = alone().name("three").world_size(3).rank(1).timeout(200ms);
  EXPECT_ERROR(
      [&] { std::ignore = init_process_group(store, options); },
      "expected 3 processes to join group 'three' within 200 ms, got none with ranks 0, 2. "
      "Check that all were started, with the same world size and address.");
}

TEST(ProcessGroupErrors, RanksThatComeTwiceOrFromAnotherWorld) {
  const auto store = new_store();
  const auto prefixed = [&](const char* key, const std::string& value) {
    store->set(key, std::vector<std::uint8_t>(value.begin(), value.end()));
  };
  store->add("twice/0/claims/1", 1);
  EXPECT_ERROR(
      [&] { std::ignore = init_process_group(store, alone().name("twice").world_size(2).rank(1)); },
      "expected one process for each rank of group 'twice', got 2 with rank 1.");
  prefixed("other/0/terms/0", "world size 4");
  EXPECT_ERROR(
      [&] { std::ignore = init_process_group(store, alone().name("other").world_size(2).rank(1)); },
      "expected all processes of group 'other' to be started alike, got world size 4 in rank "
      "0 and world size 2 in rank 1.");
}

TEST(ProcessGroupErrors, APortThatIsInUse) {
  const HeldPort held;
  held.listen();
  const auto options = alone().master_addr("127.0.0.1").master_port(held.port);
  EXPECT_ERROR(
      [&] { std::ignore = init_process_group(options); },
      "expected port " + std::to_string(held.port) + " of 127.0.0.1 to be free for rank 0");
  EXPECT_ERROR([&] { std::ignore = init_process_group(options); }, "Choose another MASTER_PORT.");
}

TEST(ProcessGroupErrors, NobodyAnswers) {
  const HeldPort held;
  const auto options = alone().rank(1).world_size(2).timeout(1s);
  const auto connect = [&] {
    std::ignore = init_process_group(
        ProcessGroupOptions(options).master_addr("127.0.0.1").master_port(held.port));
  };
  EXPECT_ERROR(connect, "expected rank 0 to answer at 127.0.0.1:" + std::to_string(held.port) +
                            " within 1 s, got: ");
}

TEST(ProcessGroupErrors, NcclWithoutAGpuOrABuildOfIt) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "needs a machine without a GPU";
  const auto error =
      error_of([] { std::ignore = init_process_group(new_store(), alone().backend("nccl")); });
  const bool clear = error.find("got \"nccl\". Build torchfuse with TORCHFUSE_WITH_CUDA=ON") !=
                         std::string::npos ||
                     error.find("expected a GPU for local rank 0, got 0") != std::string::npos;
  EXPECT_TRUE(clear) << error;
}

}  // namespace
}  // namespace torchfuse::testing
