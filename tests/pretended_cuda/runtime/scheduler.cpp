// SPDX-License-Identifier: BSD-3-Clause
#include "scheduler.h"

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <thread>
#include <utility>

#include "capture.h"
#include "device.h"
#include "memory.h"

namespace pretended_cuda {
namespace {

using namespace std::chrono_literals;

/// Between two looks at work that waits for other processes: longer and longer while nothing moves,
/// for these share the processors.
constexpr std::chrono::microseconds kShortestPause = 50us;
constexpr std::chrono::microseconds kLongestPause = 1ms;
/// After that time without a call of the program, collectives go on by themselves.
constexpr auto kIdle = 2ms;

}  // namespace

Scheduler& Scheduler::instance() {
  // Never destroyed: other threads may be in it when the process ends.
  static auto* const scheduler = new Scheduler;
  return *scheduler;
}

/// The ranks of a program under torchrun have the same environment, but for their number.
Scheduler::Scheduler() {
  const auto seed = static_cast<unsigned>(setting("PRETENDED_CUDA_SEED", 0));
  set_seed(seed == 0 ? 0 : seed + 100 * static_cast<unsigned>(setting("RANK", 0)));
}

void Scheduler::set_seed(unsigned seed) {
  seed_ = seed;
  random_.seed(seed);
}

CUstream_st* Scheduler::create(unsigned flags, int priority) {
  streams_.push_back(std::make_unique<CUstream_st>());
  CUstream_st* const stream = streams_.back().get();
  stream->device = current_device();
  stream->flags = flags;
  stream->priority = priority;
  return stream;
}

CUstream_st* Scheduler::resolve(cudaStream_t stream) {
  if (stream != nullptr && stream != cudaStreamLegacy && stream != cudaStreamPerThread) {
    return stream;
  }
  const auto device = static_cast<std::size_t>(current_device());
  if (default_streams_.size() <= device) default_streams_.resize(device + 1);
  if (default_streams_[device] == nullptr) default_streams_[device] = create(cudaStreamDefault, 0);
  return default_streams_[device];
}

bool Scheduler::is_default(const CUstream_st* stream) const {
  const auto device = static_cast<std::size_t>(stream->device);
  return device < default_streams_.size() && default_streams_[device] == stream;
}

void Scheduler::push(CUstream_st* stream, Work work) {
  work.order = ++submitted_;
  with_peers_ += work.has_peers ? 1 : 0;
  ++stream->submitted;
  stream->queue.push_back(std::make_shared<Work>(std::move(work)));
}

/// A device's default stream and its streams without cudaStreamNonBlocking wait for each other.
void Scheduler::order_with_default_stream(CUstream_st* stream) {
  if ((stream->flags & cudaStreamNonBlocking) != 0) return;
  const bool from_default = is_default(stream);
  for (const auto& other : streams_) {
    const bool ordered = other.get() != stream && other->device == stream->device &&
                         (other->flags & cudaStreamNonBlocking) == 0 &&
                         (from_default || is_default(other.get()));
    if (ordered && !other->queue.empty()) {
      push(stream, {.name = "default stream", .run = [] { return true; }, .after = other->end()});
    }
  }
}

void Scheduler::submit(Lock& lock, CUstream_st* stream, Work work) {
  if (stream->capture != nullptr) {
    stream->capture->add(stream, std::move(work));
    return;
  }
  order_with_default_stream(stream);
  push(stream, std::move(work));
  last_call_ = std::chrono::steady_clock::now();
  if (with_peers_ != 0 && !alone_) {
    alone_ = true;
    std::atexit([] { instance().stop_alone(); });
    std::thread([this] { go_on_alone(); }).detach();
  }
  if (lazy()) return;
  while (!running_ && run_any(lock)) {
  }
}

/// The stream whose first piece comes next, or null if none can go on. Lazy: any that may.
CUstream_st* Scheduler::choose() {
  std::vector<CUstream_st*> ready;
  for (const auto& stream : streams_) {
    if (stream->queue.empty() || stream->stalled || !stream->queue.front()->after.reached())
      continue;
    ready.push_back(stream.get());
  }
  if (ready.empty()) return nullptr;
  if (lazy()) return ready[random_() % ready.size()];
  CUstream_st* first = ready.front();
  for (CUstream_st* stream : ready) {
    if (stream->queue.front()->order < first->queue.front()->order) first = stream;
  }
  return first;
}

/// Returns whether it was done to its end. Nothing else may be running.
bool Scheduler::run_first(Lock& lock, CUstream_st* stream) {
  WorkPointer work = stream->queue.front();
  running_ = true;
  lock.unlock();
  bool done = true;
  Memory::instance().open();
  try {
    done = work->run();
  } catch (const std::exception& error) {
    set_fault(cudaErrorAssert, work->name, error.what());
  }
  Memory::instance().close();
  lock.lock();
  running_ = false;
  stream->stalled = !done;
  if (done && !stream->queue.empty() && stream->queue.front() == work) {
    stream->queue.pop_front();
    ++stream->done;
    with_peers_ -= work->has_peers ? 1 : 0;
    ++completed_;
  }
  changed_.notify_all();
  lock.unlock();
  work.reset();  // frees what the work holds, which may take other locks
  lock.lock();
  return done;
}

/// Returns false if nothing can go on now. What stalled is tried again when all others have
/// stalled.
bool Scheduler::run_any(Lock& lock) {
  if (CUstream_st* stream = choose()) {
    run_first(lock, stream);
    return true;
  }
  for (const auto& stream : streams_) stream->stalled = false;
  return false;
}

void Scheduler::wait(Lock& lock, const Place& place) {
  last_call_ = std::chrono::steady_clock::now();
  auto pause = kShortestPause;
  std::uint64_t seen = completed_;
  while (!place.reached()) {
    if (running_) {
      changed_.wait(lock);
    } else if (!run_any(lock)) {
      changed_.wait_for(lock, pause);
      pause = completed_ == seen ? std::min(2 * pause, kLongestPause) : kShortestPause;
      seen = completed_;
    }
  }
}

void Scheduler::wait_for_device(Lock& lock, int device) {
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    if (device < 0 || streams_[i]->device == device) wait(lock, streams_[i]->end());
  }
}

void Scheduler::wait_for_all(Lock& lock) { wait_for_device(lock, -1); }

void Scheduler::pass_time(Lock& lock, const Place& place) {
  if (!place.reached() && !running_) run_any(lock);
}

void Scheduler::go_on_alone() {
  Lock alone(mutex_);
  while (!ending_) {
    alone.unlock();
    std::this_thread::sleep_for(kIdle);
    alone.lock();
    if (with_peers_ == 0 || running_) continue;
    if (std::chrono::steady_clock::now() - last_call_ < kIdle) continue;
    while (!ending_ && !running_ && run_any(alone)) {
    }
  }
}

/// What work uses may be destroyed after this.
void Scheduler::stop_alone() {
  Lock lock(mutex_);
  ending_ = true;
  changed_.wait(lock, [this] { return !running_; });
}

std::uint64_t Scheduler::pending() const {
  std::uint64_t pending = 0;
  for (const auto& stream : streams_) pending += stream->queue.size();
  return pending;
}

void Scheduler::drop_pending(Lock& lock) {
  changed_.wait(lock, [this] { return !running_; });
  for (const auto& stream : streams_) {
    stream->queue.clear();
    stream->done = stream->submitted;
    stream->stalled = false;
    stream->capture = nullptr;
  }
  with_peers_ = 0;
}

}  // namespace pretended_cuda
