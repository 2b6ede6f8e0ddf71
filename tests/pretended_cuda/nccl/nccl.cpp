// SPDX-License-Identifier: BSD-3-Clause
// The functions of libnccl.so.2: communicators and groups.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "../runtime/pretended_cuda.h"
#include "communicator.h"
#include "issue.h"

using namespace pretended_nccl;

namespace {

thread_local std::string last_error;

/// What a thread has issued since ncclGroupStart.
struct OpenGroup {
  int depth = 0;
  ncclResult_t result = ncclSuccess;  ///< the first error of its calls
  std::vector<cudaStream_t> streams;
  std::vector<Operation> operations;
};
thread_local OpenGroup open_group;

/// Makes a device the current one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    cudaGetDevice(&before_);
    cudaSetDevice(device);
  }
  ~DeviceGuard() { cudaSetDevice(before_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
};

/// What `after` gets from now on waits for what `before` has.
cudaError_t order(cudaStream_t before, cudaStream_t after) {
  cudaEvent_t event = nullptr;
  cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  if (error == cudaSuccess) error = cudaEventRecord(event, before);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(after, event, 0);
  cudaEventDestroy(event);
  return error;
}

cudaError_t submit(cudaStream_t stream, std::vector<Operation> operations) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream, &status);
  const bool captured = status != cudaStreamCaptureStatusNone;
  const pretended_cuda_work work{
      "a collective of NCCL",
      [](void* launch) { return static_cast<Launch*>(launch)->run() ? 1 : 0; },
      [](void* launch) { delete static_cast<Launch*>(launch); },
      new Launch(std::move(operations), captured),
      1,
      [](void* launch) -> void* { return new Launch(*static_cast<Launch*>(launch)); }};
  return pretended_cuda_submit(stream, &work);
}

/// One piece of work, in the order of all streams that the calls were made for.
ncclResult_t hand_over(const std::vector<cudaStream_t>& streams,
                       std::vector<Operation> operations) {
  const DeviceGuard guard(operations.front().communicator->device);
  const cudaStream_t first = streams.front();
  cudaError_t error = cudaSuccess;
  const auto for_others = [&](auto join) {
    for (std::size_t i = 1; i < streams.size() && error == cudaSuccess; ++i) {
      const auto until = streams.begin() + static_cast<std::ptrdiff_t>(i);
      if (std::find(streams.begin(), until, streams[i]) == until) error = join(streams[i]);
    }
  };
  for_others([&](cudaStream_t other) { return order(other, first); });
  if (error == cudaSuccess) error = submit(first, std::move(operations));
  for_others([&](cudaStream_t other) { return order(first, other); });
  if (error == cudaSuccess) return ncclSuccess;
  return fail(ncclUnhandledCudaError, cudaGetErrorString(error));
}

ncclResult_t make_communicator(ncclComm_t* result, int ranks, const ncclUniqueId& id, int rank) {
  return guarded([&] {
    *result = nullptr;
    if (ranks < 1 || ranks > kMaxRanks || rank < 0 || rank >= ranks) {
      throw std::invalid_argument("expected a rank below the number of ranks, up to " +
                                  std::to_string(kMaxRanks) + ", got rank " + std::to_string(rank) +
                                  " of " + std::to_string(ranks));
    }
    if (open_group.depth > 0) {
      throw std::invalid_argument(
          "the pretended NCCL makes no communicators between ncclGroupStart and ncclGroupEnd");
    }
    int device = 0;
    cudaGetDevice(&device);
    *result = new ncclComm{std::make_shared<Communicator>(id, rank, ranks, device)};
    return ncclSuccess;
  });
}

/// What each rank says in ncclCommSplit. The first of a color brings the new communicator.
struct Claim {
  int color;
  int key;
  int rank;
  ncclUniqueId id;
};

std::vector<Claim> claims_of_color(Communicator& parent, const Claim& mine) {
  const std::vector<char> landed = parent.gather_on_host("ncclCommSplit", &mine, sizeof(mine));
  std::vector<Claim> claims(static_cast<std::size_t>(parent.ranks));
  std::memcpy(claims.data(), landed.data(), landed.size());
  std::erase_if(claims, [&](const Claim& claim) { return claim.color != mine.color; });
  std::sort(claims.begin(), claims.end(), [](const Claim& a, const Claim& b) {
    return std::tie(a.key, a.rank) < std::tie(b.key, b.rank);
  });
  return claims;
}

}  // namespace

namespace pretended_nccl {

ncclResult_t fail(ncclResult_t result, const std::string& words) {
  last_error = words;
  if (open_group.depth > 0 && open_group.result == ncclSuccess) open_group.result = result;
  return result;
}

/// For not_there.cpp.
int refuse(const char* function) {
  const std::string words = std::string("the pretended NCCL has no ") + function;
  std::fprintf(stderr, "pretended CUDA: %s\n", words.c_str());
  return fail(ncclInvalidUsage, words);
}

ncclResult_t issue(Operation operation, cudaStream_t stream) {
  if (open_group.depth > 0) {
    open_group.streams.push_back(stream);
    open_group.operations.push_back(std::move(operation));
    return ncclSuccess;
  }
  std::vector<Operation> operations;
  operations.push_back(std::move(operation));
  return hand_over({stream}, std::move(operations));
}

}  // namespace pretended_nccl

// --- What the library says of itself -------------------------------------------------------------

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "an error without words in the pretended NCCL";
  }
}

const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }

// --- Groups --------------------------------------------------------------------------------------

ncclResult_t ncclGroupStart() {
  ++open_group.depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (open_group.depth == 0) {
    return fail(ncclInvalidUsage, "ncclGroupEnd: expected ncclGroupStart before, got none");
  }
  if (--open_group.depth > 0) return ncclSuccess;
  OpenGroup group = std::exchange(open_group, {});
  if (group.result != ncclSuccess || group.operations.empty()) return group.result;
  return hand_over(group.streams, std::move(group.operations));
}

// --- Communicators -------------------------------------------------------------------------------

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  return guarded([&] {
    *id = Segment::make_id();
    return ncclSuccess;
  });
}

ncclResult_t ncclCommInitRank(ncclComm_t* result, int ranks, ncclUniqueId id, int rank) {
  return make_communicator(result, ranks, id, rank);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* result, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t*) {
  return make_communicator(result, ranks, id, rank);
}

ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* result,
                           ncclConfig_t*) {
  return guarded([&] {
    const CommunicatorPointer kept = parent->communicator;  // another thread may abort it
    Communicator& here = *kept;
    *result = nullptr;
    const Claim mine{color, key, here.rank, Segment::make_id()};
    const std::vector<Claim> claims = claims_of_color(here, mine);
    if (color == NCCL_SPLIT_NOCOLOR || claims.front().rank != here.rank) Segment::discard(mine.id);
    if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
    const auto me = std::find_if(claims.begin(), claims.end(),
                                 [&](const Claim& claim) { return claim.rank == here.rank; });
    return make_communicator(result, static_cast<int>(claims.size()), claims.front().id,
                             static_cast<int>(me - claims.begin()));
  });
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const CommunicatorPointer kept = comm->communicator;  // another thread may abort it
  while (!kept->aborted && !kept->is_idle()) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  comm->communicator->aborted = true;
  return ncclCommDestroy(comm);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* result) {
  *result = ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  *count = comm->communicator->ranks;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->communicator->rank;
  return ncclSuccess;
}
