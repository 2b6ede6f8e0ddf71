// SPDX-License-Identifier: BSD-3-Clause
// What a run says while it trains: log.jsonl, a progress bar, and a summary.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace lm {

/// The log that examples/python/sharded_lm_report.py reads: one JSON object a line.
class Log {
 public:
  /// What a run that broke off wrote after its checkpoint, at step `begin`, goes.
  Log(const std::string& path, std::string layout, std::int64_t begin)
      : layout_(std::move(layout)) {
    std::vector<std::string> kept;
    if (begin > 0) {
      std::ifstream before(path);
      for (std::string line; std::getline(before, line);) {
        if (step_of(line) <= begin) kept.push_back(line);
      }
    }
    file_.open(path);
    for (const std::string& line : kept) file_ << line << std::endl;
    if (!file_) throw std::runtime_error("cannot write " + path);
  }

  /// Adds a line, which can be read at once.
  void write(std::int64_t step, const std::vector<std::pair<const char*, double>>& values) {
    file_ << "{\"layout\": \"" << layout_ << "\", \"step\": " << step;
    for (const auto& [name, value] : values) file_ << ", \"" << name << "\": " << text_of(value);
    file_ << "}" << std::endl;
    if (!file_) throw std::runtime_error("cannot write the log of step " + std::to_string(step));
  }

 private:
  static std::int64_t step_of(const std::string& line) {
    const std::string key = "\"step\": ";
    const std::size_t place = line.find(key);
    if (place == std::string::npos) {
      throw std::runtime_error("expected a step in every line of the log, got '" + line + "'");
    }
    return std::stoll(line.substr(place + key.size()));
  }

  /// As few digits as tell the number from all others; what is not finite as Python writes it.
  static std::string text_of(double value) {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
    std::array<char, 32> digits{};
    return {digits.data(), std::to_chars(digits.begin(), digits.end(), value).ptr};
  }

  std::string layout_;
  std::ofstream file_;
};

/// How far a run is: one line that is redrawn on a terminal, else a line every `every` steps.
class Progress {
 public:
  Progress(std::string label, std::int64_t every, std::int64_t end)
      : label_(std::move(label)), every_(every), end_(end) {}

  void show(std::int64_t step, double loss, double tokens_per_second) {
    speeds_.push_back(tokens_per_second);
    const bool last = step == end_;
    if (!on_terminal_ && !last && step % every_ != 0) return;
    const auto filled = static_cast<std::size_t>(kWidth * step / end_);
    const std::string bar = std::string(filled, '#') + std::string(kWidth - filled, '.');
    std::fprintf(stderr, "%s%s [%s] %lld/%lld steps, loss %.3f, %.0f tokens/s%s",
                 on_terminal_ ? "\r\033[K" : "", label_.c_str(), bar.c_str(),
                 static_cast<long long>(step), static_cast<long long>(end_), loss,
                 tokens_per_second, on_terminal_ && !last ? "" : "\n");
  }

  /// Median of the steps after the first ones.
  double tokens_per_second() const {
    const std::size_t first = speeds_.size() > kFirstSteps ? kFirstSteps : 0;
    std::vector<double> sorted(speeds_.begin() + static_cast<std::ptrdiff_t>(first), speeds_.end());
    std::sort(sorted.begin(), sorted.end());
    return sorted.at(sorted.size() / 2);
  }

 private:
  static constexpr std::int64_t kWidth = 30;
  static constexpr std::size_t kFirstSteps = 3;

  std::string label_;
  std::int64_t every_;
  std::int64_t end_;
  bool on_terminal_ = ::isatty(STDERR_FILENO) == 1;
  std::vector<double> speeds_;
};

}  // namespace lm
