// SPDX-License-Identifier: BSD-3-Clause
// Streams, events and work for the tests of the pretended runtime.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "../runtime/pretended_cuda.h"

namespace pretended_cuda::testing {

/// Hands a function to a stream, as a kernel.
inline cudaError_t submit(cudaStream_t stream, std::function<void()> function) {
  using Function = std::function<void()>;
  const pretended_cuda_work work{"a test's work",
                                 [](void* context) {
                                   (*static_cast<Function*>(context))();
                                   return 1;
                                 },
                                 [](void* context) { delete static_cast<Function*>(context); },
                                 new Function(std::move(function)), 0};
  return pretended_cuda_submit(stream, &work);
}

inline cudaStream_t make_stream() {
  cudaStream_t stream = nullptr;
  EXPECT_EQ(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, 0), cudaSuccess);
  return stream;
}

inline cudaEvent_t make_event() {
  cudaEvent_t event = nullptr;
  EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  return event;
}

/// Every test starts with an eager device without work, and leaves one.
class Runtime : public ::testing::Test {
 protected:
  void SetUp() override { clear(); }
  void TearDown() override { clear(); }

  /// A function that notes its name in `log`.
  std::function<void()> note(std::string name) {
    return [this, name = std::move(name)] { log.push_back(name); };
  }

  std::vector<std::string> log;

 private:
  static void clear() {
    pretended_cuda_reset();
    pretended_cuda_set_seed(0);
    pretended_cuda_set_memory(0);
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    cudaGetLastError();
  }
};

/// With the seeds that a test tries the lazy order with.
class LazyRuntime : public Runtime, public ::testing::WithParamInterface<unsigned> {
 protected:
  void SetUp() override {
    Runtime::SetUp();
    pretended_cuda_set_seed(GetParam());
  }
};

}  // namespace pretended_cuda::testing
