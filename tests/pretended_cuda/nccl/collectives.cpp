// SPDX-License-Identifier: BSD-3-Clause
// The functions of libnccl.so.2 that move data between ranks.
#include <memory>
#include <utility>

#include "issue.h"
#include "reduce.h"

using namespace pretended_nccl;

namespace {

/// One call while it is put together.
class Building {
 public:
  Building(const char* name, ncclComm_t comm, std::size_t count, ncclDataType_t type)
      : type_(type), count_(count) {
    if (comm == nullptr) throw std::invalid_argument(std::string(name) + ": no communicator");
    operation_.communicator = comm->communicator;
    operation_.call = Call::named(name, count * bytes_per_element(type));
    operation_.call.type = type;
  }

  [[nodiscard]] int ranks() const { return operation_.communicator->ranks; }
  [[nodiscard]] bool is(int rank) const { return operation_.communicator->rank == rank; }
  void set_root(int root) {
    check(root);
    operation_.call.root = root;
  }

  /// The message has `count` elements, the part-th of those at `bytes`.
  void send(int peer, const void* bytes, int part = 0) {
    check(peer);
    operation_.sent.push_back({peer, at(const_cast<void*>(bytes), part)});
  }
  void receive(int peer, void* bytes, int part = 0) {
    check(peer);
    operation_.received.push_back({peer, at(bytes, part)});
  }

  /// Receives one message of each rank and reduces them into `out`.
  void receive_reduced(void* out, ncclRedOp_t how) {
    const auto landed = std::make_shared<std::vector<char>>(operation_.call.bytes *
                                                            static_cast<std::size_t>(ranks()));
    for (int peer = 0; peer < ranks(); ++peer) receive(peer, landed->data(), peer);
    operation_.finish = [landed, out, how, type = type_, count = count_, ranks = ranks()] {
      reduce(type, how, landed->data(), out, count, ranks);
    };
  }
  void reduces(ncclRedOp_t how) {
    if (!can_reduce(type_, how)) {
      throw std::invalid_argument(std::string(operation_.call.name) +
                                  ": expected a type and an operation that the pretended NCCL has, "
                                  "got type " +
                                  std::to_string(type_) + " and operation " + std::to_string(how));
    }
    operation_.call.operation = how;
  }

  ncclResult_t issue_on(cudaStream_t stream) { return issue(std::move(operation_), stream); }

 private:
  void check(int rank) const {
    if (rank >= 0 && rank < ranks()) return;
    throw std::invalid_argument(std::string(operation_.call.name) + ": expected a rank below " +
                                std::to_string(ranks()) + ", got " + std::to_string(rank));
  }
  [[nodiscard]] char* at(void* bytes, int part) const {
    return static_cast<char*>(bytes) + operation_.call.bytes * static_cast<std::size_t>(part);
  }

  Operation operation_;
  ncclDataType_t type_;
  std::size_t count_;
};

}  // namespace

ncclResult_t ncclAllReduce(const void* in, void* out, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t how, ncclComm_t comm, cudaStream_t stream) {
  return guarded([&] {
    Building call("ncclAllReduce", comm, count, type);
    call.reduces(how);
    for (int peer = 0; peer < call.ranks(); ++peer) call.send(peer, in);
    call.receive_reduced(out, how);
    return call.issue_on(stream);
  });
}

ncclResult_t ncclReduce(const void* in, void* out, std::size_t count, ncclDataType_t type,
                        ncclRedOp_t how, int root, ncclComm_t comm, cudaStream_t stream) {
  return guarded([&] {
    Building call("ncclReduce", comm, count, type);
    call.reduces(how);
    call.set_root(root);
    call.send(root, in);
    if (call.is(root)) call.receive_reduced(out, how);
    return call.issue_on(stream);
  });
}

/// `count` is that of each rank's result.
ncclResult_t ncclReduceScatter(const void* in, void* out, std::size_t count, ncclDataType_t type,
                               ncclRedOp_t how, ncclComm_t comm, cudaStream_t stream) {
  return guarded([&] {
    Building call("ncclReduceScatter", comm, count, type);
    call.reduces(how);
    for (int peer = 0; peer < call.ranks(); ++peer) call.send(peer, in, peer);
    call.receive_reduced(out, how);
    return call.issue_on(stream);
  });
}

ncclResult_t ncclBroadcast(const void* in, void* out, std::size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  return guarded([&] {
    Building call("ncclBroadcast", comm, count, type);
    call.set_root(root);
    if (call.is(root)) {
      for (int peer = 0; peer < call.ranks(); ++peer) call.send(peer, in);
    }
    call.receive(root, out);
    return call.issue_on(stream);
  });
}

ncclResult_t ncclBcast(void* buffer, std::size_t count, ncclDataType_t type, int root,
                       ncclComm_t comm, cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

/// `count` is that of each rank's input.
ncclResult_t ncclAllGather(const void* in, void* out, std::size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return guarded([&] {
    Building call("ncclAllGather", comm, count, type);
    for (int peer = 0; peer < call.ranks(); ++peer) {
      call.send(peer, in);
      call.receive(peer, out, peer);
    }
    return call.issue_on(stream);
  });
}

/// `count` is that of what one rank sends to another.
ncclResult_t ncclAlltoAll(const void* in, void* out, std::size_t count, ncclDataType_t type,
                          ncclComm_t comm, cudaStream_t stream) {
  return guarded([&] {
    Building call("ncclAlltoAll", comm, count, type);
    for (int peer = 0; peer < call.ranks(); ++peer) {
      call.send(peer, in, peer);
      call.receive(peer, out, peer);
    }
    return call.issue_on(stream);
  });
}

ncclResult_t ncclSend(const void* in, std::size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return guarded([&] {
    Building call("ncclSend to ncclRecv", comm, count, type);
    call.send(peer, in);
    return call.issue_on(stream);
  });
}

ncclResult_t ncclRecv(void* out, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return guarded([&] {
    Building call("ncclSend to ncclRecv", comm, count, type);
    call.receive(peer, out);
    return call.issue_on(stream);
  });
}
