// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <algorithm>
#include <chrono>

namespace torchfuse::ops {

/// `timeout` from now, a year at most: the sum would overflow for those who wait for ever.
inline std::chrono::steady_clock::time_point deadline_after(std::chrono::milliseconds timeout) {
  return std::chrono::steady_clock::now() +
         std::min<std::chrono::milliseconds>(timeout, std::chrono::years(1));
}

}  // namespace torchfuse::ops
