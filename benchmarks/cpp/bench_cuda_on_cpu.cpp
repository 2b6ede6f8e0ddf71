// SPDX-License-Identifier: BSD-3-Clause
// What it costs to run a block of CUDA threads on the CPU (tests/cpp/cuda_on_cpu): median time of a
// block of 256 threads by its number of barriers, in ascending and in random order.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda_on_cpu/engine.h"
#include "cuda_on_cpu/planted_kernels.h"

namespace {

double median_milliseconds(unsigned barriers, std::uint64_t seed) {
  constexpr int kRounds = 101;
  cuda_on_cpu::set_schedule({.seed = seed});
  std::vector<std::uint32_t> out(cuda_on_cpu::planted::kThreads);
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    if (cuda_on_cpu::planted::many_barriers(out.data(), barriers) != 0) std::abort();
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
    times.push_back(time.count());
  }
  std::nth_element(times.begin(), times.begin() + kRounds / 2, times.end());
  return times[kRounds / 2];
}

}  // namespace

int main() {
  for (const unsigned barriers : {0u, 20u, 100u}) {
    for (const std::uint64_t seed : {0, 1}) {
      std::printf("256 threads, %3u barriers, %s order: %.3f ms\n", barriers,
                  seed == 0 ? "ascending" : "random", median_milliseconds(barriers, seed));
    }
  }
  return 0;
}
