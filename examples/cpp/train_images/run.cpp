// SPDX-License-Identifier: BSD-3-Clause
#include "run.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <sys/resource.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <stdexcept>

namespace images {
namespace {

constexpr double kKibPerMib = 1024;

std::string list_of(const std::vector<double>& numbers) {
  std::string text;
  for (const double number : numbers) {
    char digits[32] = "NaN";  // as Python writes it
    if (std::isfinite(number)) std::snprintf(digits, sizeof digits, "%.17g", number);
    text += (text.empty() ? "" : ", ") + std::string(digits);
  }
  return "[" + text + "]";
}

/// The system's memory in MiB by the names of /proc/meminfo, such as "MemTotal:".
std::map<std::string, double> system_memory() {
  std::ifstream file("/proc/meminfo");
  std::map<std::string, double> memory;
  std::string name;
  std::string rest;
  double kib = 0;
  while (file >> name >> kib && std::getline(file, rest)) memory[name] = kib / kKibPerMib;
  return memory;
}

}  // namespace

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t value = line.find(": ");
    if (line.starts_with("model name") && value != std::string::npos) return line.substr(value + 2);
  }
  return "CPU";
}

Memory memory_now(const torch::Device& device) {
  if (device.is_cuda()) {
    constexpr double kMib = 1024 * kKibPerMib;
    const auto [free, total] = c10::getDeviceAllocator(device.type())
                                   ->getMemoryInfo(device.has_index() ? device.index() : 0);
    const auto used = static_cast<double>(total - free);
    return {used / kMib, static_cast<double>(free) / kMib, static_cast<double>(total) / kMib};
  }
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto memory = system_memory();
  return {static_cast<double>(usage.ru_maxrss) / kKibPerMib, memory.at("MemAvailable:"),
          memory.at("MemTotal:")};
}

void Run::write(const std::string& path) const {
  std::ofstream file(path);
  file << "{\"language\": \"C++\", \"device\": \"" << device << "\", \"precision\": \"" << precision
       << "\",\n \"losses\": " << list_of(losses) << ",\n \"accuracies\": " << list_of(accuracies)
       << ",\n \"step_seconds\": " << list_of(step_seconds)
       << ",\n \"memory_mib\": {\"used\": " << memory.used << ", \"free\": " << memory.free
       << ", \"total\": " << memory.total << "}}\n";
  if (!file) throw std::runtime_error("could not write " + path);
}

}  // namespace images
