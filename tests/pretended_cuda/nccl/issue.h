// SPDX-License-Identifier: BSD-3-Clause
// How NCCL's functions hand operations to streams, and fail.
#pragma once

#include <exception>
#include <stdexcept>
#include <string>

#include "communicator.h"

namespace pretended_nccl {

/// Queues it on the stream, or behind what the thread's open group has.
ncclResult_t issue(Operation operation, cudaStream_t stream);

/// Keeps the words for ncclGetLastError.
ncclResult_t fail(ncclResult_t result, const std::string& words);

/// Calls a function that may throw.
template <typename Function>
ncclResult_t guarded(Function function) {
  try {
    return function();
  } catch (const std::invalid_argument& error) {
    return fail(ncclInvalidUsage, error.what());
  } catch (const std::exception& error) {
    return fail(ncclSystemError, error.what());
  }
}

}  // namespace pretended_nccl
