// SPDX-License-Identifier: BSD-3-Clause
// Kernels get shared memory only through these functions, so that the functions can be replaced
// when the kernels run on a CPU.
#pragma once

#include <cstddef>
#include <type_traits>

namespace torchfuse::kernels {

#if defined(__CUDACC__)

/// Returns the block's single object of type T, uninitialized. All calls with the same T return the
/// same object, so every use needs a separate struct.
template <class T>
__device__ __forceinline__ T& block_shared() {
  static_assert(std::is_trivially_default_constructible_v<T>);
  __shared__ T object;
  return object;
}

#else

/// Returns the running block's storage for `key`, aligned for any type. Defined by the code that
/// runs the kernels on a CPU.
void* block_shared_storage(const void* key, std::size_t bytes);

template <class T>
T& block_shared() {
  static_assert(std::is_trivially_default_constructible_v<T>);
  static const char key = 0;
  return *static_cast<T*>(block_shared_storage(&key, sizeof(T)));
}

#endif

}  // namespace torchfuse::kernels
