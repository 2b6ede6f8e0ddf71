// SPDX-License-Identifier: BSD-3-Clause
// Starts all kernels.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/common/dtype.h"
#include "kernels/common/float16.h"
#include "kernels/common/status.h"
#include "kernels/common/stream.h"

namespace torchfuse::kernels::cuda {

/// The driver's limit for kernel arguments since CUDA 12.1.
constexpr std::size_t kMaxArgumentBytes = 32764;

// Note [Short lists]
// A launch copies all of a kernel's arguments, used or not. The kernels that most trainings use
// have a second instance with room for fewer rows, for lists that fit. Rows that are misaligned or
// kept on the device, averages, storage types that are looked up, fp64 and layerwise optimizers
// have large launches only.
constexpr std::size_t kShortArgumentBytes = 4096;

/// Enqueues `kernel`, whose only parameter is `const Arguments __grid_constant__`. The qualifier is
/// after the type, so that the emulator in tests/cpp/cuda_on_cpu can turn the parameter into a
/// reference: one copy for all threads, as on a device.
template <class Parameter, class Arguments>
Status launch(void (*kernel)(Parameter), const Arguments& arguments, std::uint32_t blocks,
              std::uint32_t threads, Stream stream, const char* what) {
  static_assert(std::is_same_v<std::remove_cvref_t<Parameter>, Arguments>);
  static_assert(sizeof(Arguments) <= kMaxArgumentBytes);
  void* pointers[] = {const_cast<Arguments*>(&arguments)};
  const cudaError_t error =
      cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), pointers, 0, stream);
  if (error == cudaSuccess) return Status{};
  // Clear the error, because it is reported here and must not reach a later check.
  static_cast<void>(cudaGetLastError());
  return Status{static_cast<int>(error), what};
}

/// Calls run(S{}) for the storage type S.
template <class Run>
Status dispatch_dtype(DType dtype, const char* what, const Run& run) {
  switch (dtype) {
    case DType::kFloat32:
      return run(float{});
    case DType::kFloat64:
      return run(double{});
    case DType::kFloat16:
      return run(Half{});
    case DType::kBFloat16:
      return run(BFloat16{});
  }
  return Status{cudaErrorInvalidValue, what};
}

}  // namespace torchfuse::kernels::cuda
