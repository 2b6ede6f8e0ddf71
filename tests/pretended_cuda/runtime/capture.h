// SPDX-License-Identifier: BSD-3-Clause
// Captures and the graphs that they become: lists of work, in the order of issue.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <thread>
#include <vector>

#include "scheduler.h"

namespace pretended_cuda {

/// A capture between begin and end; all under the scheduler's lock.
///
/// Note [What a stream of a capture has joined]
/// A stream that waits for an event of the capture becomes part of it. Its work counts as joined
/// when a stream that reaches the origin has waited for an event recorded behind it: `seen[a][b]`
/// is how much of b's work comes before what a does next.
struct Capture {
  std::uint64_t id = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  CUstream_st* origin = nullptr;
  bool invalid = false;
  std::vector<WorkPointer> works;
  using Seen = std::map<CUstream_st*, std::uint64_t>;
  std::map<CUstream_st*, Seen> seen;

  void add(CUstream_st* stream, Work work);
  [[nodiscard]] bool all_joined() const;
};

/// What was known on a stream of a capture when an event was recorded.
struct CapturedPlace {
  std::uint64_t capture = 0;  ///< id, 0: none
  Capture::Seen seen;
};

/// All captures that are being made.
class Captures {
 public:
  static Captures& instance();
  Capture* begin(CUstream_st* stream, cudaStreamCaptureMode mode);
  [[nodiscard]] Capture* find(std::uint64_t id) const;
  /// Takes the capture from its streams and from the list.
  void end(Capture* capture);
  /// The error of a call that no capture bears, such as an allocation, if the calling thread may
  /// not make it. The captures in the way are invalid from now on.
  cudaError_t refuse_unsafe_call(const Lock&);
  void drop_all();

 private:
  std::vector<Capture*> captures_;
  std::uint64_t last_id_ = 0;
};

/// The calling thread's, of cudaThreadExchangeStreamCaptureMode.
cudaStreamCaptureMode& thread_capture_mode();

}  // namespace pretended_cuda

/// What cudaGraph_t points at.
struct CUgraph_st {
  std::vector<pretended_cuda::WorkPointer> works;
};
/// What cudaGraphExec_t points at.
struct CUgraphExec_st {
  std::vector<pretended_cuda::WorkPointer> works;
  pretended_cuda::Place last_replay = {};
};
