// SPDX-License-Identifier: BSD-3-Clause
#include "communicator.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

namespace pretended_nccl {

Communicator::Communicator(const ncclUniqueId& id, int rank_, int ranks_, int device_)
    : rank(rank_),
      ranks(ranks_),
      device(device_),
      segment(Segment::join(id, rank_, ranks_, device_)) {
  for (int second = 0; second < ranks; ++second) {
    for (int first = 0; first < second; ++first) {
      if (segment->device_of(first) != segment->device_of(second)) continue;
      throw std::invalid_argument("Duplicate GPU detected: rank " + std::to_string(first) +
                                  " and rank " + std::to_string(second) + " both on CUDA device " +
                                  std::to_string(segment->device_of(first)));
    }
  }
}

std::vector<char> Communicator::gather_on_host(const char* name, const void* bytes,
                                               std::size_t count) {
  const Call call = Call::named(name, count);
  std::vector<char> landed(count * static_cast<std::size_t>(ranks));
  std::vector<std::vector<Message>> messages(1);
  for (int peer = 0; peer < ranks; ++peer) {
    char* const place = landed.data() + count * static_cast<std::size_t>(peer);
    messages[0].push_back(Message::to(segment->ring(Side::kHost, rank, peer), call, bytes));
    messages[0].push_back(Message::from(segment->ring(Side::kHost, peer, rank), call, place, peer));
  }
  while (!advance(messages)) {
    if (aborted) throw std::runtime_error(std::string(name) + ": the communicator was aborted");
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return landed;
}

std::uint64_t Communicator::take_turn() {
  const std::lock_guard lock(mutex_);
  out_.insert(taken_);
  return taken_++;
}

bool Communicator::has_turn(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  return *out_.begin() == number;
}

void Communicator::give_back(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  out_.erase(number);
}

bool Communicator::is_idle() {
  const std::lock_guard lock(mutex_);
  return out_.empty();
}

bool advance(std::vector<std::vector<Message>>& lists) {
  std::vector<Message> pending;
  for (std::vector<Message>& list : lists) {
    const std::size_t first = pending.size();
    for (Message& message : list) {
      const bool waits = std::any_of(pending.begin(), pending.end(), [&](const Message& earlier) {
        return message.is_behind(earlier);
      });
      if (waits || !message.advance()) pending.push_back(message);
    }
    list.assign(pending.begin() + static_cast<std::ptrdiff_t>(first), pending.end());
  }
  return pending.empty();
}

Launch::Launch(std::vector<Operation> operations, bool captured)
    : operations_(std::move(operations)) {
  if (captured) return;
  for (const Operation& operation : operations_) {
    const bool has_one = std::any_of(turns_.begin(), turns_.end(), [&](const Turn& turn) {
      return turn.communicator == operation.communicator;
    });
    if (!has_one) turns_.push_back({operation.communicator, operation.communicator->take_turn()});
  }
}

void Launch::give_turns_back() {
  for (const auto& [communicator, number] : turns_) communicator->give_back(number);
  turns_.clear();
}

bool Launch::has_its_turns() const {
  return std::all_of(turns_.begin(), turns_.end(), [](const Turn& turn) {
    return turn.communicator->aborted || turn.communicator->has_turn(turn.number);
  });
}

void Launch::begin() {
  begun_ = true;
  for (const Operation& operation : operations_) {
    const Communicator& here = *operation.communicator;
    std::vector<Message>& messages = messages_.emplace_back();
    for (const auto& [peer, bytes] : operation.sent) {
      Ring& ring = here.segment->ring(Side::kStreams, here.rank, peer);
      messages.push_back(Message::to(ring, operation.call, bytes));
    }
    for (const auto& [peer, bytes] : operation.received) {
      Ring& ring = here.segment->ring(Side::kStreams, peer, here.rank);
      messages.push_back(Message::from(ring, operation.call, bytes, peer));
    }
  }
}

bool Launch::run() {
  if (!has_its_turns()) return false;
  if (!begun_) begin();
  for (std::size_t i = 0; i < operations_.size(); ++i) {
    if (operations_[i].communicator->aborted) messages_[i].clear();
  }
  try {
    if (!advance(messages_)) return false;
  } catch (...) {
    give_turns_back();  // what comes later is not held up by what went wrong
    throw;
  }
  for (const Operation& operation : operations_) {
    if (operation.finish && !operation.communicator->aborted) operation.finish();
  }
  give_turns_back();
  return true;
}

}  // namespace pretended_nccl
