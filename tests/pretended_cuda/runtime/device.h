// SPDX-License-Identifier: BSD-3-Clause
// Settings, devices and errors.
#pragma once

#include <cuda_runtime_api.h>

#define PRETENDED_CUDA_API extern "C" __attribute__((visibility("default")))

namespace pretended_cuda {

/// The number in the environment variable, or `otherwise`.
unsigned long long setting(const char* name, unsigned long long otherwise);

int device_count();
int current_device();
/// Whether there is such a device; sets the error.
bool is_device(int device);

/// Remembers an error for cudaGetLastError, and returns it.
cudaError_t report(cudaError_t error);
/// What every call returns after a kernel has gone wrong, or cudaSuccess.
cudaError_t fault();
void set_fault(cudaError_t error, const char* what, const char* words);
void forget_fault();

/// Loads the redirected ATen ops, once torch's CUDA library is in the process.
void load_redirect();

}  // namespace pretended_cuda
