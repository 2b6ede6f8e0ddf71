// SPDX-License-Identifier: BSD-3-Clause
#include "measure.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

namespace digits {
namespace {

constexpr int kBarWidth = 40;

double process_peak_kib() {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.rfind("VmHWM:", 0) == 0) return std::stod(line.substr(6));
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss);
}

c10::CachingDeviceAllocator::Stat device_memory(c10::Device device) {
  constexpr auto kAggregate = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const c10::DeviceIndex index = device.has_index() ? device.index() : c10::DeviceIndex{0};
  return c10::getDeviceAllocator(device.type())->getDeviceStats(index).allocated_bytes[kAggregate];
}

/// The processor's feature flags; empty where the system does not list them.
std::set<std::string> cpu_flags() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string line;
  while (std::getline(cpuinfo, line)) {
    if (line.rfind("flags", 0) != 0 && line.rfind("Features", 0) != 0) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    std::set<std::string> flags;
    for (std::string word; words >> word;) flags.insert(word);
    return flags;
  }
  return {};
}

}  // namespace

ProgressBar::ProgressBar(std::string label, std::int64_t total)
    : label_(std::move(label)), total_(total), on_terminal_(isatty(STDERR_FILENO) == 1) {
  if (on_terminal_) draw();
}

void ProgressBar::advance() {
  ++done_;
  const std::int64_t percent = on_terminal_ ? 100 * done_ / total_ : 10 * done_ / total_ * 10;
  if (percent == drawn_percent_ || percent == 0) return;
  drawn_percent_ = percent;
  draw();
}

void ProgressBar::finish() {
  if (on_terminal_) std::fputc('\n', stderr);
}

void ProgressBar::draw() const {
  if (!on_terminal_) {
    std::fprintf(stderr, "%s: %lld of %lld steps\n", label_.c_str(), static_cast<long long>(done_),
                 static_cast<long long>(total_));
    return;
  }
  const auto filled = total_ == 0 ? 0 : static_cast<std::size_t>(kBarWidth * done_ / total_);
  const std::string bar = std::string(filled, '#') + std::string(kBarWidth - filled, '.');
  std::fprintf(stderr, "\r%s [%s] %lld/%lld steps", label_.c_str(), bar.c_str(),
               static_cast<long long>(done_), static_cast<long long>(total_));
  std::fflush(stderr);
}

PeakMemory::PeakMemory(c10::Device device) : device_(device) {
  if (device_.is_cuda()) {
    const c10::DeviceIndex index = device_.has_index() ? device_.index() : c10::DeviceIndex{0};
    c10::getDeviceAllocator(device_.type())->resetPeakStats(index);
    start_kib_ = static_cast<double>(device_memory(device_).current) / 1024.0;
    return;
  }
  std::ofstream("/proc/self/clear_refs") << "5";
  start_kib_ = process_peak_kib();
}

double PeakMemory::mib() const {
  const double peak_kib = device_.is_cuda()
                              ? static_cast<double>(device_memory(device_).peak) / 1024.0
                              : process_peak_kib();
  return (peak_kib - start_kib_) / 1024.0;
}

std::string cpu_support(const std::string& mode) {
  if (mode == "fp32") return "native";
  const std::set<std::string> flags = cpu_flags();
  if (flags.empty()) return "unknown, this system does not list the processor's features";
  const std::vector<std::string> native =
      mode == "bf16" ? std::vector<std::string>{"amx_bf16", "avx512_bf16", "bf16", "svebf16"}
                     : std::vector<std::string>{"amx_fp16", "avx512_fp16", "asimdhp", "fphp"};
  std::string found;
  for (const std::string& flag : native) {
    if (flags.count(flag) > 0) found += (found.empty() ? "" : ", ") + flag;
  }
  if (!found.empty()) return "native (" + found + ")";
  return "emulated: stored in 16 bits, computed in fp32; slower, the same training";
}

}  // namespace digits
