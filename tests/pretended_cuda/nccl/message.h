// SPDX-License-Identifier: BSD-3-Clause
// What the ranks of a communicator say to each other.
#pragma once

#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "segment.h"

namespace pretended_nccl {

/// The call that a message belongs to. Both ends of a message must be in the same call.
struct Call {
  char name[24] = "";
  ncclDataType_t type = ncclInt8;
  int operation = -1;  ///< ncclRedOp_t; -1: the call does not reduce
  int root = -1;       ///< -1: the call has none
  std::uint64_t bytes = 0;

  static Call named(const char* name, std::uint64_t bytes);
  bool operator==(const Call&) const = default;
};

/// For example "ncclReduce of 16 bytes (type 7, operation 0, root 1)".
std::string to_string(const Call& call);
std::size_t bytes_per_element(ncclDataType_t type);

/// One message on its way: the call, then its bytes. It goes on whenever it is asked to.
class Message {
 public:
  static Message to(Ring& ring, const Call& call, const void* bytes) {
    return Message(ring, call, const_cast<char*>(static_cast<const char*>(bytes)), true);
  }
  static Message from(Ring& ring, const Call& call, void* bytes, int peer) {
    return Message(ring, call, static_cast<char*>(bytes), false, peer);
  }

  /// Returns whether it has arrived at the other end: who sends meets who receives. Throws
  /// std::runtime_error if the peer is in another call.
  bool advance();
  /// Whether one of them must arrive before the other begins.
  [[nodiscard]] bool is_behind(const Message& other) const {
    return ring_ == other.ring_ && outgoing_ == other.outgoing_;
  }

 private:
  Message(Ring& ring, const Call& call, char* bytes, bool outgoing, int peer = -1)
      : ring_(&ring), call_(call), bytes_(bytes), outgoing_(outgoing), peer_(peer) {}
  bool move(char* bytes, std::size_t begin, std::size_t count);

  Ring* ring_;
  Call call_;   ///< of this rank
  Call other_;  ///< as it came
  char* bytes_;
  bool outgoing_;
  int peer_;
  std::size_t moved_ = 0;  ///< with the call
  std::uint64_t end_ = 0;  ///< in the ring, of what was sent; 0: not known yet
};

}  // namespace pretended_nccl
