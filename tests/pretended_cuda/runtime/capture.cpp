// SPDX-License-Identifier: BSD-3-Clause
#include "capture.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "device.h"

namespace pretended_cuda {

void Capture::add(CUstream_st* stream, Work work) {
  works.push_back(std::make_shared<Work>(std::move(work)));
  seen[stream][stream] = works.size();
}

bool Capture::all_joined() const {
  const Seen& known = seen.at(origin);
  return std::all_of(seen.begin(), seen.end(), [&](const auto& each) {
    const auto& [stream, of_stream] = each;
    if (stream == origin) return true;
    const auto own = of_stream.find(stream);
    const auto at = known.find(stream);
    const std::uint64_t issued = own == of_stream.end() ? 0 : own->second;
    return at != known.end() && at->second >= issued;
  });
}

Captures& Captures::instance() {
  static auto* const captures = new Captures;
  return *captures;
}

Capture* Captures::begin(CUstream_st* stream, cudaStreamCaptureMode mode) {
  auto* const capture = new Capture;
  capture->id = ++last_id_;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->origin = stream;
  capture->seen[stream][stream] = 0;
  stream->capture = capture;
  captures_.push_back(capture);
  return capture;
}

Capture* Captures::find(std::uint64_t id) const {
  for (Capture* capture : captures_) {
    if (capture->id == id) return capture;
  }
  return nullptr;
}

void Captures::end(Capture* capture) {
  for (const auto& [stream, seen] : capture->seen) stream->capture = nullptr;
  captures_.erase(std::find(captures_.begin(), captures_.end(), capture));
  delete capture;
}

cudaError_t Captures::refuse_unsafe_call(const Lock&) {
  if (const cudaError_t error = fault()) return error;
  if (thread_capture_mode() == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  bool forbidden = false;
  for (Capture* capture : captures_) {
    const bool own = capture->thread == std::this_thread::get_id();
    const bool global = capture->mode == cudaStreamCaptureModeGlobal &&
                        thread_capture_mode() == cudaStreamCaptureModeGlobal;
    if (!global && !(own && capture->mode != cudaStreamCaptureModeRelaxed)) continue;
    capture->invalid = forbidden = true;
  }
  return forbidden ? report(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

void Captures::drop_all() {
  while (!captures_.empty()) end(captures_.back());
}

cudaStreamCaptureMode& thread_capture_mode() {
  thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  return mode;
}

}  // namespace pretended_cuda
