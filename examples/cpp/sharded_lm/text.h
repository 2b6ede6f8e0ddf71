// SPDX-License-Identifier: BSD-3-Clause
// Text that every machine with Python has: the tokens of examples/python/sharded_lm_data.py.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <dirent.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace lm {

constexpr std::int64_t kVocabulary = 256;     // a token is a byte
constexpr std::size_t kValidationEvery = 10;  // files, of which one is kept from training

struct Batch {
  torch::Tensor tokens;     ///< [samples, sequence]
  torch::Tensor following;  ///< the token after each
};

/// The names in a folder that end so, in the order of their bytes.
inline std::vector<std::string> names_in(const std::string& folder, const std::string& ending) {
  const std::unique_ptr<DIR, void (*)(DIR*)> entries(::opendir(folder.c_str()),
                                                     [](DIR* opened) { ::closedir(opened); });
  if (!entries) throw std::runtime_error("expected a folder, got " + folder);
  std::vector<std::string> names;
  while (const dirent* entry = ::readdir(entries.get())) {
    const std::string name = entry->d_name;
    if (name.ends_with(ending)) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// Windows of the files <folder>/*.py for training and for validation, the same in every process.
/// A step's batch depends on the number of the step alone: it is the same however many processes
/// share it, and a run that goes on from a checkpoint needs no state of a loader.
class Corpus {
 public:
  Corpus(const std::string& folder, std::int64_t sequence) : sequence_(sequence) {
    std::string training;
    std::string validation;
    std::size_t index = 0;
    for (const std::string& name : names_in(folder, ".py")) {
      std::ifstream file(folder + "/" + name, std::ios::binary);
      std::string& text = index++ % kValidationEvery == 0 ? validation : training;
      text.append(std::istreambuf_iterator<char>(file), {});
      if (!file) throw std::runtime_error("cannot read " + folder + "/" + name);
    }
    const auto shortest = static_cast<std::int64_t>(std::min(training.size(), validation.size()));
    if (shortest <= sequence) {
      throw std::runtime_error("expected more than " + std::to_string(sequence) +
                               " bytes of Python's sources (*.py) for training and for " +
                               "validation in " + folder + ", found " + std::to_string(shortest));
    }
    training_ = tokens_of(std::move(training));
    validation_ = tokens_of(std::move(validation));
  }

  /// The batch of a step, of all processes.
  Batch batch(std::int64_t step, std::int64_t samples) const {
    const auto random = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(step));
    const std::int64_t last = training_.size(0) - sequence_;
    return windows(training_, torch::randint(last, {samples}, random));
  }

  /// The same windows each time, spread evenly over the text kept for validation.
  Batch validation_batch(std::int64_t samples) const {
    const std::int64_t last = validation_.size(0) - sequence_ - 1;
    return windows(validation_, torch::floor_divide(torch::arange(samples) * last, samples));
  }

 private:
  static torch::Tensor tokens_of(std::string text) {
    return torch::from_blob(text.data(), {static_cast<std::int64_t>(text.size())}, torch::kByte)
        .clone();
  }

  Batch windows(const torch::Tensor& text, const torch::Tensor& starts) const {
    const torch::Tensor positions = starts.unsqueeze(1) + torch::arange(sequence_ + 1);
    const torch::Tensor tokens = text.index({positions}).to(torch::kLong);
    return {tokens.narrow(1, 0, sequence_), tokens.narrow(1, 1, sequence_)};
  }

  std::int64_t sequence_;
  torch::Tensor training_;
  torch::Tensor validation_;
};

}  // namespace lm
