// SPDX-License-Identifier: BSD-3-Clause
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>

#include "cuda_on_cpu/engine.h"
#include "cuda_on_cpu/recorder.h"
#include "device.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) (static_cast<void>(address))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) (static_cast<void>(address))
#endif

namespace torchfuse::kernels::testing {
namespace {

constexpr std::size_t kPage = 4096;
constexpr unsigned char kFresh = 0xff;
constexpr unsigned char kMargin = 0xa5;

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace

bool device_is_cpu() { return true; }
Stream stream() { return nullptr; }
void synchronize() {}
bool accesses_are_counted() { return cuda_on_cpu::recorder_available(); }

void set_order(const Order& order) {
  cuda_on_cpu::Schedule schedule;
  schedule.seed = order.seed;
  schedule.resident_blocks = order.resident_blocks;
  schedule.flush_denormals = order.flush_denormals;
  cuda_on_cpu::set_schedule(schedule);
}

struct DeviceMemory::State {
  unsigned char* mapping;
  std::size_t mapping_bytes;
  unsigned char* pages;  ///< the accessible ones
  std::size_t pages_bytes;
  unsigned char* data;
  std::size_t bytes;

  State(std::size_t bytes_, std::size_t misalignment, Guard guard) : bytes(bytes_) {
    pages_bytes = round_up(bytes + 32, kPage);
    mapping_bytes = pages_bytes + 2 * kPage;
    mapping = static_cast<unsigned char*>(mmap(nullptr, mapping_bytes, PROT_NONE,
                                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    pages = mapping + kPage;
    if (mapping == MAP_FAILED || mprotect(pages, pages_bytes, PROT_READ | PROT_WRITE) != 0) {
      std::perror("memory for a tensor");
      std::abort();
    }
    // The last address with this alignment, or the first.
    std::size_t at = misalignment;
    if (guard == Guard::kEnd) at += (pages_bytes - bytes - misalignment) / 16 * 16;
    data = pages + at;
    std::fill(pages, data, kMargin);
    std::fill(data, data + bytes, kFresh);
    std::fill(data + bytes, pages + pages_bytes, kMargin);
    poison_margins(true);
    cuda_on_cpu::watch(data, bytes);
  }
  State(const State&) = delete;

  ~State() {
    cuda_on_cpu::unwatch(data);
    poison_margins(false);
    munmap(mapping, mapping_bytes);
  }

  void poison_margins(bool poisoned) const {
    if (poisoned) {
      ASAN_POISON_MEMORY_REGION(pages, static_cast<std::size_t>(data - pages));
      ASAN_POISON_MEMORY_REGION(data + bytes,
                                static_cast<std::size_t>(pages + pages_bytes - data - bytes));
    } else {
      ASAN_UNPOISON_MEMORY_REGION(pages, pages_bytes);
    }
  }
};

DeviceMemory::DeviceMemory(std::size_t bytes, std::size_t misalignment, Guard guard)
    : state_(std::make_unique<State>(bytes, misalignment, guard)) {}
DeviceMemory::~DeviceMemory() = default;
DeviceMemory::DeviceMemory(DeviceMemory&&) noexcept = default;
DeviceMemory& DeviceMemory::operator=(DeviceMemory&&) noexcept = default;

void* DeviceMemory::data() const { return state_->data; }
std::size_t DeviceMemory::bytes() const { return state_->bytes; }

void DeviceMemory::upload(const void* source) const {
  if (state_->bytes == 0) return;
  std::memcpy(state_->data, source, state_->bytes);
  cuda_on_cpu::watch(state_->data, state_->bytes);
}

void DeviceMemory::download(void* target) const {
  if (state_->bytes != 0) std::memcpy(target, state_->data, state_->bytes);
}

void DeviceMemory::expect_margins_intact() const {
  const auto is_margin = [](unsigned char byte) { return byte == kMargin; };
  state_->poison_margins(false);
  EXPECT_TRUE(std::all_of(state_->pages, state_->data, is_margin)) << "in front of a tensor";
  EXPECT_TRUE(
      std::all_of(state_->data + state_->bytes, state_->pages + state_->pages_bytes, is_margin))
      << "behind a tensor";
  state_->poison_margins(true);
}

void DeviceMemory::expect_accesses(unsigned reads, unsigned writes) const {
  if (!accesses_are_counted() || state_->bytes == 0) return;
  const cuda_on_cpu::AccessCounts& counts = cuda_on_cpu::counts_of(state_->data);
  for (std::size_t i = 0; i < state_->bytes; ++i) {
    ASSERT_EQ(counts.reads[i], reads) << "reads of byte " << i << " of " << state_->bytes;
    ASSERT_EQ(counts.writes[i], writes) << "writes of byte " << i << " of " << state_->bytes;
  }
}

std::size_t DeviceMemory::loads() const {
  if (!accesses_are_counted() || state_->bytes == 0) return 0;
  return cuda_on_cpu::counts_of(state_->data).loads;
}

std::size_t DeviceMemory::stores() const {
  if (!accesses_are_counted() || state_->bytes == 0) return 0;
  return cuda_on_cpu::counts_of(state_->data).stores;
}

std::size_t DeviceMemory::prefetches() const {
  if (!accesses_are_counted() || state_->bytes == 0) return 0;
  const std::vector<bool>& bytes = cuda_on_cpu::counts_of(state_->data).prefetched;
  return static_cast<std::size_t>(std::count(bytes.begin(), bytes.end(), true));
}

}  // namespace torchfuse::kernels::testing
