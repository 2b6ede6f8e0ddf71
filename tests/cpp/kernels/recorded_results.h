// SPDX-License-Identifier: BSD-3-Clause
// Checksums of results, in files by which runs on two architectures are compared: make
// test-aarch64.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "kernel_test.h"
#include "kernels/common/step_scalars.h"
#include "kernels/common/stochastic_rounding.h"

namespace torchfuse::kernels::testing {

/// What both architectures promise of a number: its bits, but that NaN is NaN, and that the
/// smallest normal float may be the zero that it is to a processor which looks for denormals before
/// it rounds.
inline std::uint64_t promised_bits(double value) {
  if (std::isnan(value)) return 0x7ff8000000000000;
  if (std::abs(value) == 0x1p-126) value = std::copysign(0.0, value);
  std::uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

/// The numbers of one test in the order in which they are added: get(i) for each i below `count`.
/// Writes a line to the test's file in the folder TORCHFUSE_RECORDED_RESULTS, if it is set.
template <class Get>
void record_numbers(std::int64_t count, const Get& get) {
  const char* folder = std::getenv("TORCHFUSE_RECORDED_RESULTS");
  if (folder == nullptr) return;
  std::uint64_t sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum = mix_bits(sum ^ promised_bits(get(i)));
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  std::string name = std::string(test->test_suite_name()) + "." + test->name() + ".txt";
  std::replace(name.begin(), name.end(), '/', '_');  // of a typed suite
  const std::string path = std::string(folder) + "/" + name;
  std::ofstream file(path, std::ios::app);
  file << count << ' ' << std::hex << sum << '\n';
  ASSERT_TRUE(file.flush()) << "record: expected to write to " << path << ", got an error.";
}

inline void record(const Buffer& values) {
  record_numbers(values.numel(), [&](std::int64_t i) { return values.get(i); });
}
template <class T>
  requires std::is_floating_point_v<T>
void record(const std::vector<T>& values) {
  record_numbers(static_cast<std::int64_t>(values.size()), [&](std::int64_t i) {
    return static_cast<double>(values[static_cast<std::size_t>(i)]);
  });
}
inline void record(const std::vector<Buffer>& list) {
  for (const Buffer& values : list) record(values);
}
inline void record(const std::vector<NormPartial>& partials) {
  for (const NormPartial& p : partials) {
    record(std::vector<double>{p.small, p.big, static_cast<double>(p.nonfinite)});
  }
}
template <class First, class Second, class... More>
void record(const First& first, const Second& second, const More&... more) {
  record(first);
  record(second, more...);
}

}  // namespace torchfuse::kernels::testing
