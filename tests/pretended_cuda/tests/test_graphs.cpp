// SPDX-License-Identifier: BSD-3-Clause
// Capture: what it records, what it forbids, and replay.
#include "runtime_testing.h"

namespace pretended_cuda::testing {
namespace {

using Log = std::vector<std::string>;
using Graphs = LazyRuntime;

struct Captured {
  cudaError_t error;
  cudaGraph_t graph;
};

Captured end(cudaStream_t stream) {
  Captured captured{};
  captured.error = cudaStreamEndCapture(stream, &captured.graph);
  return captured;
}

void replay(cudaGraph_t graph, cudaStream_t stream) {
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaGraphInstantiateWithFlags(&executable, graph, 0), cudaSuccess);
  ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
  ASSERT_EQ(cudaGraphLaunch(executable, stream), cudaSuccess);
  ASSERT_EQ(cudaGraphExecDestroy(executable), cudaSuccess) << "what was launched runs all the same";
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
}

TEST_P(Graphs, RunAtReplayOnly) {
  cudaStream_t stream = make_stream();
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  submit(stream, note("a"));
  submit(stream, note("b"));
  const Captured captured = end(stream);
  ASSERT_EQ(captured.error, cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_TRUE(log.empty());
  std::size_t nodes = 0;
  EXPECT_EQ(cudaGraphGetNodes(captured.graph, nullptr, &nodes), cudaSuccess);
  EXPECT_EQ(nodes, 2u);
  replay(captured.graph, stream);
  EXPECT_EQ(log, (Log{"a", "b", "a", "b"}));
  EXPECT_EQ(cudaGraphDestroy(captured.graph), cudaSuccess);
}

TEST_P(Graphs, StreamsJoinByEvents) {
  cudaStream_t stream = make_stream();
  cudaStream_t side = make_stream();
  cudaEvent_t event = make_event();
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  submit(stream, note("a"));
  cudaEventRecord(event, stream);
  EXPECT_EQ(cudaStreamWaitEvent(side, event, 0), cudaSuccess);
  submit(side, note("b"));
  EXPECT_TRUE(log.empty()) << "the side stream records too";
  cudaEventRecord(event, side);
  EXPECT_EQ(cudaStreamWaitEvent(stream, event, 0), cudaSuccess);
  const Captured captured = end(stream);
  ASSERT_EQ(captured.error, cudaSuccess);
  replay(captured.graph, stream);
  EXPECT_EQ(log, (Log{"a", "b", "a", "b"}));
  submit(side, note("c"));
  cudaStreamSynchronize(side);
  EXPECT_EQ(log.back(), "c") << "the side stream is free again";
}

TEST_P(Graphs, WorkThatDidNotComeBackIsRefused) {
  cudaStream_t stream = make_stream();
  cudaStream_t side = make_stream();
  cudaEvent_t event = make_event();
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  cudaEventRecord(event, stream);
  cudaStreamWaitEvent(side, event, 0);
  submit(side, note("joined"));
  cudaEventRecord(event, side);
  cudaStreamWaitEvent(stream, event, 0);
  submit(side, note("not joined"));
  const Captured captured = end(stream);
  EXPECT_EQ(captured.error, cudaErrorStreamCaptureUnjoined);
  EXPECT_EQ(captured.graph, nullptr);
}

TEST_P(Graphs, CallsThatACaptureDoesNotBear) {
  cudaStream_t stream = make_stream();
  void* memory = nullptr;
  void* kept = nullptr;
  ASSERT_EQ(cudaMalloc(&kept, 16), cudaSuccess);
  cudaEvent_t event = make_event();
  cudaEventRecord(event, make_stream());
  using Call = std::function<cudaError_t()>;
  const std::vector<std::pair<const char*, Call>> calls = {
      {"cudaMalloc", [&] { return cudaMalloc(&memory, 16); }},
      {"cudaFree", [&] { return cudaFree(kept); }},
      {"cudaHostAlloc", [&] { return cudaHostAlloc(&memory, 16, 0); }},
      {"cudaDeviceSynchronize", [&] { return cudaDeviceSynchronize(); }},
      {"cudaStreamSynchronize", [&] { return cudaStreamSynchronize(stream); }},
      {"cudaStreamQuery", [&] { return cudaStreamQuery(stream); }},
      {"cudaEventQuery", [&] { return cudaEventQuery(event); }},
      {"cudaEventSynchronize", [&] { return cudaEventSynchronize(event); }},
      {"settle", [&] { return pretended_cuda_settle(stream); }},
  };
  for (const auto& [name, call] : calls) {
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    EXPECT_EQ(call(), cudaErrorStreamCaptureUnsupported) << name;
    EXPECT_EQ(end(stream).error, cudaErrorStreamCaptureInvalidated) << name;
  }
  EXPECT_EQ(cudaFree(kept), cudaSuccess) << "afterwards all is as before";
}

TEST_P(Graphs, ReplaysOfOneGraphFollowEachOther) {
  cudaStream_t one = make_stream();
  cudaStream_t two = make_stream();
  ASSERT_EQ(cudaStreamBeginCapture(one, cudaStreamCaptureModeGlobal), cudaSuccess);
  for (const char* name : {"first", "second"}) submit(one, note(name));
  cudaGraphExec_t executable = nullptr;
  ASSERT_EQ(cudaGraphInstantiateWithFlags(&executable, end(one).graph, 0), cudaSuccess);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(cudaGraphLaunch(executable, one), cudaSuccess);
    EXPECT_EQ(cudaGraphLaunch(executable, two), cudaSuccess);
  }
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  ASSERT_EQ(log.size(), 12u);
  for (std::size_t i = 0; i < log.size(); ++i) {
    EXPECT_EQ(log[i], i % 2 == 0 ? "first" : "second") << i;
  }
}

TEST_P(Graphs, WorkOutsideCannotBeWaitedForInside) {
  cudaStream_t stream = make_stream();
  cudaStream_t outside = make_stream();
  cudaEvent_t event = make_event();
  submit(outside, note("outside"));
  cudaEventRecord(event, outside);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_EQ(cudaStreamWaitEvent(stream, event, 0), cudaErrorStreamCaptureIsolation);
  EXPECT_EQ(end(stream).error, cudaErrorStreamCaptureInvalidated);
}

INSTANTIATE_TEST_SUITE_P(EagerAndLazy, Graphs, ::testing::Values(0u, 1u, 2u));

}  // namespace
}  // namespace pretended_cuda::testing
