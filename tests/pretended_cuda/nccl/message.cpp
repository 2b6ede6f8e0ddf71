// SPDX-License-Identifier: BSD-3-Clause
#include "message.h"

#include <cstring>
#include <stdexcept>

namespace pretended_nccl {

Call Call::named(const char* name, std::uint64_t bytes) {
  Call call{.bytes = bytes};
  std::strncpy(call.name, name, sizeof(call.name) - 1);
  return call;
}

std::string to_string(const Call& call) {
  std::string text = std::string(call.name) + " of " + std::to_string(call.bytes) +
                     " bytes (type " + std::to_string(call.type);
  if (call.operation >= 0) text += ", operation " + std::to_string(call.operation);
  if (call.root >= 0) text += ", root " + std::to_string(call.root);
  return text + ")";
}

std::size_t bytes_per_element(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      throw std::runtime_error("expected a type of NCCL, got " + std::to_string(type));
  }
}

/// Moves what is left of the bytes that stand at `begin` in the message.
bool Message::move(char* bytes, std::size_t begin, std::size_t count) {
  const std::size_t done = moved_ - begin;
  moved_ +=
      outgoing_ ? ring_->put(bytes + done, count - done) : ring_->take(bytes + done, count - done);
  return moved_ == begin + count;
}

bool Message::advance() {
  if (moved_ < sizeof(Call)) {
    if (!move(reinterpret_cast<char*>(outgoing_ ? &call_ : &other_), 0, sizeof(Call))) return false;
    if (!outgoing_ && !(other_ == call_)) {
      throw std::runtime_error("expected " + to_string(call_) + " from rank " +
                               std::to_string(peer_) + ", got " + to_string(other_));
    }
  }
  if (moved_ < sizeof(Call) + call_.bytes && !move(bytes_, sizeof(Call), call_.bytes)) return false;
  if (!outgoing_) return true;
  if (end_ == 0) end_ = ring_->written();
  return ring_->is_taken(end_);
}

}  // namespace pretended_nccl
