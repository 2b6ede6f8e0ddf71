// SPDX-License-Identifier: BSD-3-Clause
// Images in files, one folder for each class, as examples/python/image_folder.py writes them.
#pragma once

#include <torch/torch.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace images {

/// Gray images [1, H, W] in [-1, 1] with their labels, read from <folder>/<label>/<name>.pgm when
/// they are asked for, by any thread. Where a seed is given each is moved by up to a pixel and made
/// darker or brighter, in each epoch anew and as in the Python program.
class ImageFolder : public torch::data::datasets::Dataset<ImageFolder> {
 public:
  explicit ImageFolder(const std::string& folder, std::optional<std::uint64_t> seed = std::nullopt);

  torch::data::Example<> get(std::size_t index) override;
  std::optional<std::size_t> size() const override { return files_.size(); }
  /// The epoch, of this set and of all its copies: a data loader has one for each of its threads.
  void set_epoch(std::int64_t epoch) { *epoch_ = epoch; }
  std::int64_t classes() const { return classes_; }

 private:
  std::vector<std::pair<std::string, std::int64_t>> files_;  // with their labels
  std::int64_t classes_ = 0;
  std::optional<std::uint64_t> seed_;
  std::shared_ptr<std::atomic<std::int64_t>> epoch_ =
      std::make_shared<std::atomic<std::int64_t>>(0);
};

}  // namespace images
