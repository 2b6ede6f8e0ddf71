// SPDX-License-Identifier: BSD-3-Clause
// The order of work on streams, eager and lazy.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <set>
#include <stdexcept>
#include <thread>

#include "runtime_testing.h"

namespace pretended_cuda::testing {
namespace {

using Log = std::vector<std::string>;
using StreamsEager = Runtime;
using Streams = LazyRuntime;

TEST_P(Streams, WorkWaitsUntilTheHostDoes) {
  cudaStream_t stream = make_stream();
  submit(stream, note("first"));
  submit(stream, note("second"));
  EXPECT_TRUE(log.empty());
  EXPECT_EQ(pretended_cuda_pending(), 2u);
  EXPECT_EQ(pretended_cuda_is_idle(stream), 0);
  EXPECT_EQ(pretended_cuda_is_lazy(), 1);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(log, (Log{"first", "second"}));
}

TEST_P(Streams, AnotherStreamIsNotWaitedFor) {
  cudaStream_t one = make_stream();
  cudaStream_t two = make_stream();
  submit(one, note("one"));
  for (int i = 0; i < 64; ++i) submit(two, note("two"));
  EXPECT_EQ(cudaStreamSynchronize(one), cudaSuccess);
  EXPECT_EQ(std::count(log.begin(), log.end(), "one"), 1);
  EXPECT_GT(pretended_cuda_pending(), 0u) << "64 pieces of work before one, by chance";
}

TEST_F(StreamsEager, SeedsOrderStreamsDifferently) {
  std::set<Log> orders;
  for (unsigned seed = 1; seed <= 20; ++seed) {
    log.clear();
    pretended_cuda_set_seed(seed);
    cudaStream_t one = make_stream();
    cudaStream_t two = make_stream();
    for (const char* name : {"a", "b"}) submit(one, note(name));
    for (const char* name : {"c", "d"}) submit(two, note(name));
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_LT(std::find(log.begin(), log.end(), "a"), std::find(log.begin(), log.end(), "b"));
    EXPECT_LT(std::find(log.begin(), log.end(), "c"), std::find(log.begin(), log.end(), "d"));
    orders.insert(log);
  }
  EXPECT_GE(orders.size(), 4u) << "of six";
}

TEST_P(Streams, EventsOrderStreams) {
  cudaStream_t one = make_stream();
  cudaStream_t two = make_stream();
  cudaEvent_t event = make_event();
  submit(one, note("before"));
  EXPECT_EQ(cudaEventRecord(event, one), cudaSuccess);
  submit(one, note("behind"));
  EXPECT_EQ(cudaStreamWaitEvent(two, event, 0), cudaSuccess);
  submit(two, note("after"));
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess) << "who waits does so all the same";
  EXPECT_EQ(cudaStreamSynchronize(two), cudaSuccess);
  EXPECT_LT(std::find(log.begin(), log.end(), "before"),
            std::find(log.begin(), log.end(), "after"));
  EXPECT_NE(std::find(log.begin(), log.end(), "after"), log.end());
}

TEST_P(Streams, TheDefaultStreamAndBlockingStreamsWaitForEachOther) {
  cudaStream_t blocking = nullptr;
  ASSERT_EQ(cudaStreamCreate(&blocking), cudaSuccess);
  submit(blocking, note("blocking"));
  submit(nullptr, note("default"));
  submit(blocking, note("blocking again"));
  EXPECT_EQ(cudaStreamSynchronize(blocking), cudaSuccess);
  EXPECT_EQ(log, (Log{"blocking", "default", "blocking again"}));
}

INSTANTIATE_TEST_SUITE_P(Seeds, Streams, ::testing::Values(1u, 2u, 3u));

// --- Work that waits for others ------------------------------------------------------------------

/// Is done when `arrived` says so.
cudaError_t submit_collective(cudaStream_t stream, std::atomic<bool>& arrived) {
  const pretended_cuda_work work{
      "a collective",
      [](void* flag) { return static_cast<std::atomic<bool>*>(flag)->load() ? 1 : 0; },
      [](void*) {}, &arrived, 1};
  return pretended_cuda_submit(stream, &work);
}

class WorkWithPeers : public LazyRuntime {};

TEST_P(WorkWithPeers, HoldsItsStreamAndNotTheHost) {
  std::atomic<bool> arrived = false;
  cudaStream_t stream = make_stream();
  cudaStream_t other = make_stream();
  EXPECT_EQ(submit_collective(stream, arrived), cudaSuccess);
  submit(stream, note("behind"));
  submit(other, note("elsewhere"));
  EXPECT_EQ(cudaStreamSynchronize(other), cudaSuccess);
  EXPECT_EQ(log, Log{"elsewhere"});
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  arrived = true;
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(log, (Log{"elsewhere", "behind"}));
}

TEST_P(WorkWithPeers, GoesOnWhileTheHostIsBusy) {
  std::atomic<bool> arrived = false;
  std::atomic<bool> done = false;
  cudaStream_t stream = make_stream();
  submit_collective(stream, arrived);
  submit(stream, [&] { done = true; });
  arrived = true;
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!done && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
  EXPECT_TRUE(done);
}

INSTANTIATE_TEST_SUITE_P(EagerAndLazy, WorkWithPeers, ::testing::Values(0u, 1u, 2u));

// --- Faults --------------------------------------------------------------------------------------

TEST_P(Streams, AFaultStays) {
  cudaStream_t stream = make_stream();
  submit(stream, [] { throw std::runtime_error("out of bounds"); });
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaErrorAssert);
  void* memory = nullptr;
  EXPECT_EQ(cudaMalloc(&memory, 8), cudaErrorAssert);
  EXPECT_EQ(submit(stream, note("later")), cudaErrorAssert);
  EXPECT_EQ(cudaGetLastError(), cudaErrorAssert);
  EXPECT_EQ(cudaGetLastError(), cudaErrorAssert) << "a fault is not forgotten";
  EXPECT_STREQ(cudaGetErrorString(cudaErrorAssert), "device-side assert triggered");
}

TEST_F(StreamsEager, AStreamOfAnotherDeviceIsRefused) {
  cudaStream_t stream = make_stream();
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  EXPECT_EQ(submit(stream, note("wrong")), cudaErrorInvalidResourceHandle);
  cudaEvent_t event = make_event();
  EXPECT_EQ(cudaEventRecord(event, stream), cudaErrorInvalidResourceHandle);
  EXPECT_TRUE(log.empty());
}

}  // namespace
}  // namespace pretended_cuda::testing
