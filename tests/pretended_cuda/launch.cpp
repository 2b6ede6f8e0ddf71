// SPDX-License-Identifier: BSD-3-Clause
// Launches of our kernels go through the pretended runtime's streams.
#include <functional>
#include <utility>

#include "cuda_on_cpu/engine.h"
#include "runtime/pretended_cuda.h"

namespace cuda_on_cpu {
namespace {

struct Launch {
  LaunchShape shape;
  std::function<void()> kernel;
};

int run(void* context) {
  const auto* const launch = static_cast<const Launch*>(context);
  if (run_grid(launch->shape, launch->kernel) != 0) {
    pretended_cuda_fault(cudaErrorLaunchFailure, last_fault().c_str());
  }
  clear_launches();
  return 1;
}

}  // namespace

int launch(void* stream, const LaunchShape& shape, std::function<void()> kernel) {
  if (const int error = check_shape(shape)) return error;
  const pretended_cuda_work work{"a kernel of torchfuse", run,
                                 [](void* context) { delete static_cast<Launch*>(context); },
                                 new Launch{shape, std::move(kernel)}, 0};
  return pretended_cuda_submit(static_cast<cudaStream_t>(stream), &work);
}

}  // namespace cuda_on_cpu
