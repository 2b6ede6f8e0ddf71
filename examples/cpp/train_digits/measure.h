// SPDX-License-Identifier: BSD-3-Clause
// Progress, memory, and what the processor supports.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

namespace digits {

/// A line on stderr that is redrawn while training runs; without a terminal one line for each
/// tenth.
class ProgressBar {
 public:
  ProgressBar(std::string label, std::int64_t total);
  void advance();
  void finish();

 private:
  void draw() const;

  std::string label_;
  std::int64_t total_;
  std::int64_t done_ = 0;
  std::int64_t drawn_percent_ = -1;
  bool on_terminal_;
};

/// Peak memory of the code between construction and mib(): of torch's allocator on CUDA, of the
/// process on a CPU (Linux can reset that peak, to exclude what loading libraries needed).
class PeakMemory {
 public:
  explicit PeakMemory(c10::Device device);
  /// MiB at the peak since the start, beyond what was in use then.
  double mib() const;

 private:
  c10::Device device_;
  double start_kib_;
};

/// One sentence on how this processor computes in "fp32", "bf16" or "fp16".
std::string cpu_support(const std::string& mode);

}  // namespace digits
