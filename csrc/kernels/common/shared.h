// SPDX-License-Identifier: BSD-3-Clause
// The only way in which kernels get shared memory, so that it can be replaced when their source
// runs on a CPU.
#pragma once

#include <cstddef>
#include <type_traits>

namespace torchfuse::kernels {

#if defined(__CUDACC__)

/// The block's one object of type T, uninitialized. All calls with the same T give the same object,
/// so every use has a struct of its own.
template <class T>
__device__ __forceinline__ T& block_shared() {
  static_assert(std::is_trivially_default_constructible_v<T>);
  __shared__ T object;
  return object;
}

/// The launch's dynamic shared memory, 16-byte aligned and uninitialized, as an array of T.
template <class T>
__device__ __forceinline__ T* dynamic_shared() {
  static_assert(std::is_trivially_default_constructible_v<T> && alignof(T) <= 16);
  extern __shared__ uint4 dynamic_shared_words[];
  return reinterpret_cast<T*>(dynamic_shared_words);
}

#else

/// Storage of the running block for `key`, suitably aligned for any type. Defined by whatever runs
/// the kernels on the CPU.
void* block_shared_storage(const void* key, std::size_t bytes);

template <class T>
T& block_shared() {
  static_assert(std::is_trivially_default_constructible_v<T>);
  static const char key = 0;
  return *static_cast<T*>(block_shared_storage(&key, sizeof(T)));
}

/// The running block's dynamic shared memory. Defined as above.
void* dynamic_shared_storage();

template <class T>
T* dynamic_shared() {
  static_assert(std::is_trivially_default_constructible_v<T> && alignof(T) <= 16);
  return static_cast<T*>(dynamic_shared_storage());
}

#endif

}  // namespace torchfuse::kernels
