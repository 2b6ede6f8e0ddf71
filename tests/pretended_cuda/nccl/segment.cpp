// SPDX-License-Identifier: BSD-3-Clause
#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

namespace pretended_nccl {
namespace {

constexpr char kMark[] = "pretended NCCL";

/// What an id says: where the process that made it keeps the segment open.
struct Address {
  char mark[sizeof(kMark)];
  std::uint64_t number;  ///< by chance, for descriptors are used again
  int process;
  int descriptor;
};
static_assert(sizeof(Address) <= NCCL_UNIQUE_ID_BYTES);

std::mutex mutex;
/// Number -> descriptor of the ids that this process made, while others may open them.
std::map<std::uint64_t, int> descriptors;

std::string file_name(const Address& address) {
  return "pretended_nccl_" + std::to_string(address.number);
}

/// Whether the descriptor is that of the id's file, and of no other.
bool is_file_of(const Address& address, int file) {
  char name[128] = "";
  const std::string link = "/proc/self/fd/" + std::to_string(file);
  if (readlink(link.c_str(), name, sizeof(name) - 1) < 0) return false;
  return std::string(name).find("memfd:" + file_name(address) + " ") != std::string::npos;
}

Address address_of(const ncclUniqueId& id) {
  Address address;
  std::memcpy(&address, id.internal, sizeof(address));
  if (std::memcmp(address.mark, kMark, sizeof(kMark)) != 0) {
    throw std::runtime_error("expected an id that ncclGetUniqueId made, got another one");
  }
  return address;
}

}  // namespace

std::size_t Ring::put(const char* bytes, std::size_t count) {
  const std::uint64_t written = written_.load(std::memory_order_relaxed);
  const std::uint64_t free = kBytes - (written - read_.load(std::memory_order_acquire));
  count = std::min<std::size_t>(count, free);
  const std::size_t begin = written % kBytes;
  const std::size_t until_end = std::min(count, kBytes - begin);
  std::memcpy(bytes_ + begin, bytes, until_end);
  std::memcpy(bytes_, bytes + until_end, count - until_end);
  written_.store(written + count, std::memory_order_release);
  return count;
}

bool Ring::is_taken(std::uint64_t end) const {
  return read_.load(std::memory_order_acquire) >= end;
}

std::size_t Ring::take(char* bytes, std::size_t count) {
  const std::uint64_t read = read_.load(std::memory_order_relaxed);
  const std::uint64_t there = written_.load(std::memory_order_acquire) - read;
  count = std::min<std::size_t>(count, there);
  const std::size_t begin = read % kBytes;
  const std::size_t until_end = std::min(count, kBytes - begin);
  std::memcpy(bytes, bytes_ + begin, until_end);
  std::memcpy(bytes + until_end, bytes_, count - until_end);
  read_.store(read + count, std::memory_order_release);
  return count;
}

/// New memory is all zeros: nobody has joined, and the rings are empty.
struct alignas(Ring) Segment::Shared {
  std::atomic<int> joined;
  std::atomic<int> ranks;  ///< what the first said
  std::atomic<bool> refused;
  std::atomic<bool> claimed[kMaxRanks];
  std::atomic<int> devices[kMaxRanks];

  /// They follow, those of Side::kStreams first.
  Ring* rings() { return reinterpret_cast<Ring*>(this + 1); }
  static std::size_t bytes(int ranks) {
    return sizeof(Shared) + sizeof(Ring) * 2 * static_cast<std::size_t>(ranks * ranks);
  }
};

ncclUniqueId Segment::make_id() {
  Address address{};
  std::memcpy(address.mark, kMark, sizeof(kMark));
  std::random_device random;
  address.number = std::uint64_t{random()} << 32 | random();
  address.process = getpid();
  address.descriptor = memfd_create(file_name(address).c_str(), MFD_CLOEXEC);
  if (address.descriptor < 0) {
    throw std::runtime_error("memfd_create: " + std::string(strerror(errno)));
  }
  const std::lock_guard lock(mutex);
  descriptors[address.number] = address.descriptor;
  ncclUniqueId id{};
  std::memcpy(id.internal, &address, sizeof(address));
  return id;
}

void Segment::discard(const ncclUniqueId& id) {
  const Address address = address_of(id);
  if (address.process != getpid()) return;
  const std::lock_guard lock(mutex);
  if (descriptors.erase(address.number) != 0) close(address.descriptor);
}

std::unique_ptr<Segment> Segment::join(const ncclUniqueId& id, int rank, int ranks, int device) {
  const Address address = address_of(id);
  const std::string path =
      "/proc/" + std::to_string(address.process) + "/fd/" + std::to_string(address.descriptor);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  const std::size_t bytes = Shared::bytes(ranks);
  void* memory = MAP_FAILED;
  if (file >= 0 && is_file_of(address, file) && ftruncate(file, static_cast<off_t>(bytes)) == 0) {
    memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  const std::string reason = strerror(errno);
  if (file >= 0) close(file);
  if (memory == MAP_FAILED) {
    throw std::runtime_error(
        "the communicator's memory is not there; its process has ended, or the "
        "id was used before: " +
        path + ": " + reason);
  }
  auto* const shared = static_cast<Shared*>(memory);
  std::unique_ptr<Segment> segment(new Segment(shared, ranks));
  int said = 0;
  const bool first = shared->ranks.compare_exchange_strong(said, ranks);
  if ((!first && said != ranks) || shared->claimed[rank].exchange(true)) shared->refused = true;
  shared->devices[rank] = device;
  ++shared->joined;
  while (shared->joined < ranks && !shared->refused) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  discard(id);
  if (shared->refused) {
    throw std::invalid_argument("expected each rank once, of as many as all say, got rank " +
                                std::to_string(rank) + " of " + std::to_string(ranks) +
                                " besides another one");
  }
  return segment;
}

Segment::~Segment() { munmap(shared_, Shared::bytes(ranks_)); }

Ring& Segment::ring(Side side, int from, int to) {
  const int plane = side == Side::kStreams ? 0 : ranks_ * ranks_;
  return shared_->rings()[plane + from * ranks_ + to];
}

int Segment::device_of(int rank) const { return shared_->devices[rank]; }

}  // namespace pretended_nccl
