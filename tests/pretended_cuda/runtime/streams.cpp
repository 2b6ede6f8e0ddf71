// SPDX-License-Identifier: BSD-3-Clause
// Streams, events and waiting.
#include <chrono>
#include <memory>
#include <utility>

#include "capture.h"
#include "device.h"
#include "pretended_cuda.h"
#include "scheduler.h"

/// What cudaEvent_t points at.
struct CUevent_st {
  int device = 0;
  unsigned flags = 0;
  bool recorded = false;
  pretended_cuda::Place place;             ///< behind what the stream had
  pretended_cuda::CapturedPlace captured;  ///< or the place in a capture
  std::shared_ptr<std::chrono::steady_clock::time_point> time;
};

using namespace pretended_cuda;

namespace {

Scheduler& scheduler() { return Scheduler::instance(); }

/// The error of a call about one stream that no capture bears.
cudaError_t refuse_unsafe_call(const Lock& lock, CUstream_st* stream) {
  if (stream->capture != nullptr) {
    stream->capture->invalid = true;
    return report(cudaErrorStreamCaptureUnsupported);
  }
  return Captures::instance().refuse_unsafe_call(lock);
}

/// `stream` waits for an event of a capture: it becomes a part of it.
cudaError_t join_capture(CUstream_st* stream, const CUevent_st& event, Capture& capture) {
  if (stream->capture != nullptr && stream->capture != &capture) {
    capture.invalid = stream->capture->invalid = true;
    return report(cudaErrorStreamCaptureMerge);
  }
  if (scheduler().is_default(stream)) {  // no capture bears it; CUDA does not say by which error
    capture.invalid = true;
    return report(cudaErrorStreamCaptureImplicit);
  }
  stream->capture = &capture;
  Capture::Seen& seen = capture.seen[stream];
  for (const auto& [other, position] : event.captured.seen) {
    seen[other] = std::max(seen[other], position);
  }
  return cudaSuccess;
}

}  // namespace

// --- Streams -------------------------------------------------------------------------------------

PRETENDED_CUDA_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags,
                                                            int priority) {
  const Lock lock = scheduler().lock();
  *stream = scheduler().create(flags, priority);
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}

/// What it holds goes on. The object stays.
PRETENDED_CUDA_API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

PRETENDED_CUDA_API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  const Lock lock = scheduler().lock();
  *priority = scheduler().resolve(stream)->priority;
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaStreamQuery(cudaStream_t given) {
  Lock lock = scheduler().lock();
  CUstream_st* const stream = scheduler().resolve(given);
  if (const cudaError_t error = refuse_unsafe_call(lock, stream)) return error;
  scheduler().pass_time(lock, stream->end());
  return stream->end().reached() ? fault() : cudaErrorNotReady;
}

PRETENDED_CUDA_API cudaError_t cudaStreamSynchronize(cudaStream_t given) {
  Lock lock = scheduler().lock();
  CUstream_st* const stream = scheduler().resolve(given);
  if (const cudaError_t error = refuse_unsafe_call(lock, stream)) return error;
  scheduler().wait(lock, stream->end());
  return fault();
}

PRETENDED_CUDA_API cudaError_t cudaDeviceSynchronize() {
  Lock lock = scheduler().lock();
  if (const cudaError_t error = Captures::instance().refuse_unsafe_call(lock)) return error;
  scheduler().wait_for_device(lock, current_device());
  return fault();
}

PRETENDED_CUDA_API cudaError_t cudaStreamWaitEvent(cudaStream_t given, cudaEvent_t event,
                                                   unsigned) {
  if (const cudaError_t error = fault()) return error;
  Lock lock = scheduler().lock();
  CUstream_st* const stream = scheduler().resolve(given);
  if (!event->recorded) return cudaSuccess;
  if (event->captured.capture != 0) {
    Capture* const capture = Captures::instance().find(event->captured.capture);
    return capture != nullptr ? join_capture(stream, *event, *capture)
                              : report(cudaErrorCapturedEvent);
  }
  if (stream->capture != nullptr) {
    stream->capture->invalid = true;
    return report(cudaErrorStreamCaptureIsolation);
  }
  if (event->place.reached()) return cudaSuccess;
  scheduler().submit(
      lock, stream,
      {.name = "wait for an event", .run = [] { return true; }, .after = event->place});
  return cudaSuccess;
}

// --- Events --------------------------------------------------------------------------------------

PRETENDED_CUDA_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = new CUevent_st;
  (*event)->flags = flags;
  (*event)->device = current_device();
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}

PRETENDED_CUDA_API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const Lock lock = scheduler().lock();
  delete event;
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t given,
                                                        unsigned) {
  if (const cudaError_t error = fault()) return error;
  Lock lock = scheduler().lock();
  CUstream_st* const stream = scheduler().resolve(given);
  if (event->device != stream->device) return report(cudaErrorInvalidResourceHandle);
  event->recorded = true;
  event->place = {};
  event->captured = {};
  if (stream->capture != nullptr) {
    event->captured = {stream->capture->id, stream->capture->seen[stream]};
    return cudaSuccess;
  }
  if ((event->flags & cudaEventDisableTiming) == 0) {
    event->time = std::make_shared<std::chrono::steady_clock::time_point>();
    scheduler().submit(lock, stream, {.name = "time of an event", .run = [time = event->time] {
                                        *time = std::chrono::steady_clock::now();
                                        return true;
                                      }});
  }
  event->place = stream->end();
  return cudaSuccess;
}

PRETENDED_CUDA_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, cudaEventRecordDefault);
}

PRETENDED_CUDA_API cudaError_t cudaEventQuery(cudaEvent_t event) {
  Lock lock = scheduler().lock();
  if (const cudaError_t error = Captures::instance().refuse_unsafe_call(lock)) return error;
  if (event->captured.capture != 0) return report(cudaErrorCapturedEvent);
  if (event->place.reached()) return cudaSuccess;
  scheduler().pass_time(lock, event->place);
  return event->place.reached() ? fault() : cudaErrorNotReady;
}

PRETENDED_CUDA_API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Lock lock = scheduler().lock();
  if (const cudaError_t error = Captures::instance().refuse_unsafe_call(lock)) return error;
  if (event->captured.capture != 0) return report(cudaErrorCapturedEvent);
  const Place place = event->place;
  scheduler().wait(lock, place);
  return fault();
}

PRETENDED_CUDA_API cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start,
                                                    cudaEvent_t end) {
  const Lock lock = scheduler().lock();
  if (start->time == nullptr || end->time == nullptr) return report(cudaErrorInvalidResourceHandle);
  if (!start->place.reached() || !end->place.reached()) return cudaErrorNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(*end->time - *start->time).count();
  return cudaSuccess;
}

// --- Work of others ------------------------------------------------------------------------------

namespace {

cudaError_t add(cudaStream_t given, Work work) {
  if (const cudaError_t error = fault()) return error;
  Lock lock = scheduler().lock();
  CUstream_st* const stream = scheduler().resolve(given);
  if (stream->device != current_device()) return report(cudaErrorInvalidResourceHandle);
  scheduler().submit(lock, stream, std::move(work));
  return cudaSuccess;
}

}  // namespace

PRETENDED_CUDA_API cudaError_t pretended_cuda_submit(cudaStream_t stream,
                                                     const pretended_cuda_work* work) {
  const auto runs = [work = *work](void* context) -> std::function<bool()> {
    const std::shared_ptr<void> owned(context, work.destroy);
    return [owned, run = work.run] { return run(owned.get()) != 0; };
  };
  Work added{.name = work->name, .run = runs(work->context), .has_peers = work->has_peers != 0};
  if (work->copy != nullptr) {
    // `run` of the captured work keeps the context that is copied.
    added.run_of_replay = [runs, first = added.run, work = *work] {
      return runs(work.copy(work.context));
    };
  }
  return add(stream, std::move(added));
}

PRETENDED_CUDA_API int pretended_cuda_is_idle(cudaStream_t given) {
  const Lock lock = scheduler().lock();
  const CUstream_st* const stream = scheduler().resolve(given);
  return stream->capture == nullptr && stream->queue.empty() ? 1 : 0;
}

PRETENDED_CUDA_API int pretended_cuda_is_lazy() {
  const Lock lock = scheduler().lock();
  return scheduler().lazy() ? 1 : 0;
}

PRETENDED_CUDA_API cudaError_t pretended_cuda_settle(cudaStream_t given) {
  Lock lock = scheduler().lock();
  CUstream_st* const stream = scheduler().resolve(given);
  if (stream->capture != nullptr) {
    stream->capture->invalid = true;
    return report(cudaErrorStreamCaptureUnsupported);
  }
  scheduler().wait(lock, stream->end());
  return fault();
}

PRETENDED_CUDA_API unsigned long long pretended_cuda_pending() {
  const Lock lock = scheduler().lock();
  return scheduler().pending();
}

PRETENDED_CUDA_API void pretended_cuda_set_seed(unsigned seed) {
  Lock lock = scheduler().lock();
  scheduler().wait_for_all(lock);
  scheduler().set_seed(seed);
}

PRETENDED_CUDA_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function,
                                                  void* data) {
  return add(stream, {.name = "host function", .run = [=] {
                        function(data);
                        return true;
                      }});
}

PRETENDED_CUDA_API cudaError_t cudaStreamAddCallback(cudaStream_t stream,
                                                     cudaStreamCallback_t function, void* data,
                                                     unsigned) {
  return add(stream, {.name = "callback", .run = [=] {
                        function(stream, cudaSuccess, data);
                        return true;
                      }});
}
