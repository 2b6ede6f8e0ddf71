// SPDX-License-Identifier: BSD-3-Clause
// Counts the accesses of kernels to memory that a test watches. Works where the kernels' source is
// compiled with -fsanitize=thread but linked without the race detector: the compiler then calls a
// function for every access, and these functions are ours. In other builds nothing is recorded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cuda_on_cpu {

/// Accesses to each byte of one range, and how many instructions they came in.
struct AccessCounts {
  std::vector<std::uint8_t> reads;   ///< per byte, at most 255
  std::vector<std::uint8_t> writes;  ///< per byte, at most 255
  std::vector<bool> prefetched;      ///< per byte, whether it was asked for
  std::size_t loads = 0;
  std::size_t stores = 0;
};

/// Whether this build records.
bool recorder_available();

/// Counts from now on for the range, which must not overlap another one.
void watch(const void* begin, std::size_t bytes);
/// Ends it.
void unwatch(const void* begin);
/// The counts since watch().
const AccessCounts& counts_of(const void* begin);

}  // namespace cuda_on_cpu
