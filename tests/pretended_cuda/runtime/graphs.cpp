// SPDX-License-Identifier: BSD-3-Clause
// Capture of streams into graphs, and their replay.
#include <algorithm>
#include <utility>

#include "capture.h"
#include "device.h"
#include "scheduler.h"

using namespace pretended_cuda;

namespace {

Scheduler& scheduler() { return Scheduler::instance(); }

}  // namespace

PRETENDED_CUDA_API cudaError_t cudaStreamBeginCapture(cudaStream_t given,
                                                      cudaStreamCaptureMode mode) {
  if (const cudaError_t error = fault()) return error;
  Lock lock = scheduler().lock();
  CUstream_st* const stream = scheduler().resolve(given);
  if (given != stream) return report(cudaErrorStreamCaptureUnsupported);  // the default stream
  if (stream->capture != nullptr) return report(cudaErrorIllegalState);
  // torch fills its generator's state here, and relies on that being done long before a replay.
  scheduler().wait(lock, stream->end());
  Captures::instance().begin(stream, mode);
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaStreamEndCapture(cudaStream_t given, cudaGraph_t* graph) {
  const Lock lock = scheduler().lock();
  *graph = nullptr;
  CUstream_st* const stream = scheduler().resolve(given);
  Capture* const capture = stream->capture;
  if (capture == nullptr) return report(cudaErrorIllegalState);
  if (capture->origin != stream) return report(cudaErrorStreamCaptureUnmatched);
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id()) {
    return report(cudaErrorStreamCaptureWrongThread);
  }
  const bool invalid = capture->invalid;
  const bool joined = capture->all_joined();
  std::vector<WorkPointer> works = std::move(capture->works);
  Captures::instance().end(capture);
  if (invalid) return report(cudaErrorStreamCaptureInvalidated);
  if (!joined) return report(cudaErrorStreamCaptureUnjoined);
  *graph = new CUgraph_st{std::move(works)};
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t given, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
    const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges, std::size_t* count) {
  const Lock lock = scheduler().lock();
  const Capture* const capture = scheduler().resolve(given)->capture;
  *status = capture == nullptr ? cudaStreamCaptureStatusNone
            : capture->invalid ? cudaStreamCaptureStatusInvalidated
                               : cudaStreamCaptureStatusActive;
  if (id != nullptr) *id = capture != nullptr ? capture->id : 0;
  if (graph != nullptr) *graph = nullptr;
  if (dependencies != nullptr) *dependencies = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaStreamIsCapturing(cudaStream_t stream,
                                                     cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

PRETENDED_CUDA_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_capture_mode());
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable,
                                                             cudaGraph_t graph,
                                                             unsigned long long) {
  *executable = new CUgraphExec_st{.works = graph->works};
  return cudaSuccess;
}

/// Replays of one graph follow each other, on whatever streams.
PRETENDED_CUDA_API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t given) {
  if (const cudaError_t error = fault()) return error;
  Lock lock = scheduler().lock();
  CUstream_st* const stream = scheduler().resolve(given);
  scheduler().submit(
      lock, stream,
      {.name = "order of replays", .run = [] { return true; }, .after = executable->last_replay});
  for (const WorkPointer& captured : executable->works) {
    Work work = *captured;
    if (work.run_of_replay) work.run = work.run_of_replay();
    scheduler().submit(lock, stream, std::move(work));
  }
  executable->last_replay = stream->end();
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes,
                                                 std::size_t* count) {
  const std::size_t known = graph->works.size();
  if (nodes != nullptr) {
    *count = std::min(*count, known);
    for (std::size_t i = 0; i < *count; ++i) {
      nodes[i] = reinterpret_cast<cudaGraphNode_t>(graph->works[i].get());
    }
    return cudaSuccess;
  }
  *count = known;
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*,
                                                            cudaGraphEdgeData*,
                                                            std::size_t* count) {
  *count = 0;
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) {
  return report(cudaErrorNotSupported);
}
