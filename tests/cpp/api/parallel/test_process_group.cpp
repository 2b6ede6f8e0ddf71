// SPDX-License-Identifier: BSD-3-Clause
// Groups of processes: their life, one process with each backend through everything that
// communicates, and what each process samples; tests/python/parallel/test_data_parallel_program.py
// compares the indices with Python's.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <torch/torch.h>
#include <torchfuse/torchfuse.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "parallel_testing.h"

namespace torchfuse::testing {
namespace {

using namespace std::chrono_literals;
using parallel::DistributedSampler;
using parallel::DistributedSamplerOptions;
using parallel::init_process_group;
using parallel::ProcessGroup;
using parallel::ProcessGroupOptions;
using torch::nn::Linear;
using torch::nn::Sequential;

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
  expect_error(
      [&] { sub->barrier(); },
      "expected group 'torchfuse/0' to be open, got a closed group. Keep the ProcessGroup, "
      "and the group whose new_group() made it, open");
  group.close();
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
  expect_error(with("RANK", "two"),
               "expected the environment variable RANK to be a whole number, got 'two'. " + remedy);
  expect_error(with("WORLD_SIZE", "2x"), "WORLD_SIZE to be a whole number, got '2x'.");
  expect_error(with("WORLD_SIZE", "0"), "expected the world size to be at least 1, got 0.");
  expect_error(with("RANK", "2"),
               "expected the rank to be at least 0 and below the world size 2, got 2.");
  expect_error(with("LOCAL_RANK", "-1"), "expected the local rank to be at least 0, got -1.");
  expect_error(with("MASTER_PORT", "70000"),
               "expected the port to be between 1 and 65535, got 70000.");
}

TEST(ProcessGroupErrors, Options) {
  const auto join = [](const ProcessGroupOptions& options) {
    return [=] { std::ignore = init_process_group(new_store(), options); };
  };
  expect_error(join(alone().backend("mpi")),
               "expected backend to be \"gloo\" or \"nccl\", got \"mpi\".");
  expect_error(join(alone().timeout(0ms)), "expected timeout to be positive, got 0 ms.");
  expect_error(join(alone().leave_timeout(-1ms)), "expected leave_timeout to be at least 0");
  expect_error(join(alone().name("")), "expected name not to be empty.");
  expect_error(join(ProcessGroupOptions().backend("gloo")),
               "expected rank and world_size to be given along with a store.");
  expect_error([] { std::ignore = init_process_group({}, alone()); },
               "expected a store, got a null pointer.");
  const ProcessGroup group = init_process_group(new_store(), alone());
  expect_error(join(alone()),
               "expected name to differ from all other groups' names, got 'torchfuse'");
}

TEST(ProcessGroupErrors, SubGroups) {
  ProcessGroup group = init_process_group(new_store(), alone());
  expect_error([&] { group.new_group({}); }, "expected ranks not to be empty.");
  expect_error(
      [&] { group.new_group({1, 0}); },
      "expected ranks to be at least 0 and below the world size 1 of group 'torchfuse', got "
      "ranks 0, 1.");
  expect_error([&] { group.new_group({-1}); }, "got rank -1.");
  expect_error([&] { group.new_group({0, 0}); },
               "expected ranks without duplicates, got ranks 0, 0.");
}

TEST(ProcessGroupErrors, RanksThatDoNotCome) {
  const auto store = new_store();
  const auto options = alone().name("three").world_size(3).rank(1).timeout(200ms);
  expect_error(
      [&] { std::ignore = init_process_group(store, options); },
      "expected 3 processes to join group 'three' within 200 ms, got none with ranks 0, 2. "
      "Check that all processes were started, with the same world size and address.");
}

TEST(ProcessGroupErrors, RanksThatComeTwiceOrFromAnotherWorld) {
  const auto store = new_store();
  const auto prefixed = [&](const char* key, const std::string& value) {
    store->set(key, std::vector<std::uint8_t>(value.begin(), value.end()));
  };
  store->add("twice/0/claims/1", 1);
  expect_error(
      [&] { std::ignore = init_process_group(store, alone().name("twice").world_size(2).rank(1)); },
      "expected one process for each rank of group 'twice', got 2 with rank 1.");
  prefixed("other/0/terms/0", "world size 4");
  expect_error(
      [&] { std::ignore = init_process_group(store, alone().name("other").world_size(2).rank(1)); },
      "expected all processes of group 'other' to pass the same arguments, got world size 4 in "
      "rank 0 and world size 2 in rank 1.");
}

TEST(ProcessGroupErrors, APortThatIsInUse) {
  const HeldPort held;
  held.listen();
  const auto options = alone().master_addr("127.0.0.1").master_port(held.port);
  expect_error(
      [&] { std::ignore = init_process_group(options); },
      "expected port " + std::to_string(held.port) + " of 127.0.0.1 to be free for rank 0");
  expect_error([&] { std::ignore = init_process_group(options); }, "Choose another MASTER_PORT.");
}

TEST(ProcessGroupErrors, NobodyAnswers) {
  const HeldPort held;
  const auto options = alone().rank(1).world_size(2).timeout(1s);
  const auto connect = [&] {
    std::ignore = init_process_group(
        ProcessGroupOptions(options).master_addr("127.0.0.1").master_port(held.port));
  };
  expect_error(connect, "expected rank 0 to answer at 127.0.0.1:" + std::to_string(held.port) +
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

Sequential make_net(torch::Device device) {
  torch::manual_seed(0);
  Sequential net(Linear(4, 6), nn::SyncBatchNorm(6), Linear(6, 2));
  net->to(device);
  return net;
}

/// The parameters and buffers after three steps.
template <class Forward>
std::vector<torch::Tensor> trained(const Sequential& net, const Forward& forward) {
  torch::manual_seed(1);
  const torch::Device device = net->parameters().front().device();
  optim::FusedAdam optimizer(net->parameters());
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    forward(torch::randn({8, 4}).to(device)).square().mean().backward();
    optimizer.step();
  }
  std::vector<torch::Tensor> result = net->parameters();
  for (const auto& buffer : net->buffers()) result.push_back(buffer);
  return result;
}

class WorldOfOne : public ::testing::TestWithParam<std::string> {};

TEST_P(WorldOfOne, TrainsAsAPlainModule) {
  const std::string& backend = GetParam();
  if (backend == "nccl" && !torch::cuda::is_available()) GTEST_SKIP() << "needs a CUDA device";
  const torch::Device device = backend == "nccl" ? torch::kCUDA : torch::kCPU;
  auto options = parallel::ProcessGroupOptions().backend(backend).rank(0).world_size(1);
  parallel::ProcessGroup group = parallel::init_process_group(
      c10::make_intrusive<c10d::HashStore>(), options.timeout(std::chrono::seconds(30)));
  const torch::Tensor value = torch::full({2}, 3.0, device);
  all_reduce_(value, "sum", {group.name()});
  all_reduce_sum_(value, group.name(), "WorldOfOne", /*deterministic=*/true);
  group.barrier();
  EXPECT_TRUE(torch::equal(value.cpu(), torch::full({2}, 3.0)));

  Sequential plain = make_net(device);
  Sequential net = make_net(device);
  ASSERT_EQ(parallel::convert_sync_batch_norm(*net, group.name()), 1);
  parallel::DistributedDataParallel replica(net.ptr(), group);
  const auto expected = trained(plain, [&](const torch::Tensor& x) { return plain->forward(x); });
  const auto found = trained(net, [&](const torch::Tensor& x) { return replica.forward(x); });
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_TRUE(
        torch::allclose(found[i].to(torch::kDouble), expected[i].to(torch::kDouble), 1e-6, 1e-7))
        << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, WorldOfOne, ::testing::Values("gloo", "nccl"),
                         [](const auto& info) { return info.param; });

using Indices = std::vector<std::size_t>;

TEST(DistributedSampler, BatchesCoverTheIndices) {
  DistributedSampler sampler(10, DistributedSamplerOptions().shuffle(false));
  Indices seen;
  std::vector<std::size_t> sizes;
  while (const auto batch = sampler.next(4)) {
    sizes.push_back(batch->size());
    seen.insert(seen.end(), batch->begin(), batch->end());
  }
  EXPECT_EQ(seen, sampler.indices());
  EXPECT_EQ(sizes, (std::vector<std::size_t>{4, 4, 2}));
}

TEST(DistributedSampler, ADataLoaderFollowsTheEpoch) {
  const auto data = torch::arange(8, torch::kFloat);
  const auto set = torch::data::datasets::TensorDataset(data).map(
      torch::data::transforms::Stack<torch::data::TensorExample>());
  DistributedSampler sampler(8);
  auto loader = torch::data::make_data_loader(set, sampler, 3);
  std::vector<Indices> epochs;
  for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
    sampler.set_epoch(epoch);
    sampler.reset();
    Indices found;
    for (const auto& batch : *loader) {
      for (std::int64_t row = 0; row < batch.data.size(0); ++row) {
        found.push_back(batch.data[row].item<std::int64_t>());
      }
    }
    EXPECT_EQ(found, sampler.indices());
    epochs.push_back(found);
  }
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_NE(epochs[1], epochs[2]);
}

TEST(DistributedSampler, GoesOnWhereItWasSaved) {
  DistributedSampler saved(10);
  saved.set_epoch(5);
  saved.reset();
  saved.next(3);
  std::stringstream stream;
  torch::serialize::OutputArchive output;
  saved.save(output);
  output.save_to(stream);
  DistributedSampler loaded(10);
  torch::serialize::InputArchive input;
  input.load_from(stream);
  loaded.load(input);
  EXPECT_EQ(loaded.epoch(), 5);
  EXPECT_EQ(loaded.next(4), saved.next(4));
  DistributedSampler smaller(2);
  expect_error([&] { smaller.load(input); }, "expected the saved position to be at most 2, got 3.");
}

TEST(DistributedSampler, RefusesImpossiblePlaces) {
  expect_error([] { DistributedSampler(0); }, "expected size to be at least 1, got 0.");
  expect_error([] { DistributedSampler(1, DistributedSamplerOptions().num_replicas(0)); },
               "expected num_replicas to be at least 1, got 0.");
  expect_error([] { DistributedSampler(1, DistributedSamplerOptions().rank(1)); },
               "expected rank to be at least 0 and below num_replicas 1, got 1.");
}

}  // namespace
}  // namespace torchfuse::testing
