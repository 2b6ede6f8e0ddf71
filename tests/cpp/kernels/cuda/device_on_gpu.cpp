// SPDX-License-Identifier: BSD-3-Clause
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "device.h"

namespace torchfuse::kernels::testing {
namespace {

constexpr std::size_t kMarginBytes = 512;
constexpr unsigned char kFresh = 0xff;
constexpr unsigned char kMargin = 0xa5;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  ADD_FAILURE() << what << ": " << cudaGetErrorString(error);
  std::abort();  // the context is lost, and every later result with it
}

bool is_set(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && std::string_view(value) == "1";
}

bool gpu_required() { return is_set("TORCHFUSE_REQUIRE_CUDA"); }
bool allocations_are_exact() {
  static const bool exact = is_set("TORCHFUSE_EXACT_ALLOCATIONS");
  return exact;
}

/// Without a GPU nothing here can run: all tests are skipped, or fail where one is required.
class NeedsGpu : public ::testing::Environment {
 public:
  void SetUp() override {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaSuccess && count > 0) return;
    if (gpu_required()) {
      FAIL() << "TORCHFUSE_REQUIRE_CUDA=1, but there is no CUDA device: "
             << cudaGetErrorString(error);
    }
    GTEST_SKIP() << "needs a CUDA device";
  }
};

[[maybe_unused]] const auto* const kNeedsGpu =
    ::testing::AddGlobalTestEnvironment(new NeedsGpu);  // googletest owns it

}  // namespace

bool device_is_cpu() { return false; }
bool accesses_are_counted() { return false; }
void set_order(const Order&) {}

Stream stream() {
  static const cudaStream_t created = [] {
    cudaStream_t fresh = nullptr;
    check(cudaStreamCreateWithFlags(&fresh, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    return fresh;
  }();
  return created;
}

void synchronize() { check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize"); }

struct DeviceMemory::State {
  unsigned char* allocation = nullptr;
  unsigned char* data = nullptr;
  std::size_t bytes = 0;
  std::size_t behind = 0;  ///< bytes of the margin behind

  State(std::size_t bytes_, std::size_t misalignment) : bytes(bytes_) {
    const bool exact = allocations_are_exact();
    const std::size_t all = bytes + (exact ? misalignment : 2 * kMarginBytes);
    void* fresh = nullptr;
    check(cudaMalloc(&fresh, std::max<std::size_t>(all, 1)), "cudaMalloc");
    allocation = static_cast<unsigned char*>(fresh);
    data = allocation + (exact ? 0 : kMarginBytes / 2) + misalignment;
    if (exact) return;
    behind = all - static_cast<std::size_t>(data - allocation) - bytes;
    check(cudaMemset(allocation, kMargin, all), "cudaMemset");
    check(cudaMemset(data, kFresh, bytes), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  State(const State&) = delete;
  ~State() { check(cudaFree(allocation), "cudaFree"); }
};

DeviceMemory::DeviceMemory(std::size_t bytes, std::size_t misalignment, Guard)
    : state_(std::make_unique<State>(bytes, misalignment)) {}
DeviceMemory::~DeviceMemory() = default;
DeviceMemory::DeviceMemory(DeviceMemory&&) noexcept = default;
DeviceMemory& DeviceMemory::operator=(DeviceMemory&&) noexcept = default;

void* DeviceMemory::data() const { return state_->data; }
std::size_t DeviceMemory::bytes() const { return state_->bytes; }

void DeviceMemory::upload(const void* source) const {
  if (state_->bytes == 0) return;
  synchronize();
  check(cudaMemcpy(state_->data, source, state_->bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

void DeviceMemory::download(void* target) const {
  if (state_->bytes == 0) return;
  synchronize();
  check(cudaMemcpy(target, state_->data, state_->bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
}

void DeviceMemory::expect_margins_intact() const {
  synchronize();
  if (allocations_are_exact()) return;
  const std::size_t before = static_cast<std::size_t>(state_->data - state_->allocation);
  std::vector<unsigned char> all(before + state_->bytes + state_->behind);
  check(cudaMemcpy(all.data(), state_->allocation, all.size(), cudaMemcpyDeviceToHost),
        "cudaMemcpy");
  const auto is_margin = [](unsigned char byte) { return byte == kMargin; };
  const auto data = all.begin() + static_cast<std::ptrdiff_t>(before);
  EXPECT_TRUE(std::all_of(all.begin(), data, is_margin)) << "in front of a tensor";
  EXPECT_TRUE(std::all_of(data + static_cast<std::ptrdiff_t>(state_->bytes), all.end(), is_margin))
      << "behind a tensor";
}

void DeviceMemory::expect_accesses(unsigned, unsigned) const {}
std::size_t DeviceMemory::loads() const { return 0; }
std::size_t DeviceMemory::stores() const { return 0; }
std::size_t DeviceMemory::prefetches() const { return 0; }

}  // namespace torchfuse::kernels::testing
