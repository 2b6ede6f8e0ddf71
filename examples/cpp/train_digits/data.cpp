// SPDX-License-Identifier: BSD-3-Clause
#include "data.h"

#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>

namespace digits {
namespace {

constexpr std::int64_t kImageSide = 8;

template <typename T>
torch::Tensor read_array(const std::filesystem::path& path, torch::ScalarType dtype) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot open " + path.string());
  const auto bytes = static_cast<std::int64_t>(std::filesystem::file_size(path));
  torch::Tensor array = torch::empty({bytes / static_cast<std::int64_t>(sizeof(T))}, dtype);
  if (!file.read(static_cast<char*>(array.mutable_data_ptr()), array.nbytes())) {
    throw std::runtime_error("cannot read all of " + path.string());
  }
  return array;
}

torch::Tensor read_images(const std::filesystem::path& path) {
  return read_array<float>(path, torch::kFloat).view({-1, 1, kImageSide, kImageSide});
}

torch::Tensor read_labels(const std::filesystem::path& path) {
  return read_array<std::int64_t>(path, torch::kLong);
}

void check_pair(const torch::Tensor& images, const torch::Tensor& labels, const char* part) {
  if (images.size(0) == labels.size(0) && images.size(0) > 0) return;
  throw std::runtime_error(std::string(part) + ": expected as many labels as images, got " +
                           std::to_string(labels.size(0)) + " and " +
                           std::to_string(images.size(0)));
}

}  // namespace

Digits load_digits(const std::filesystem::path& folder) {
  Digits data{read_images(folder / "train_images.f32"), read_labels(folder / "train_labels.i64"),
              read_images(folder / "test_images.f32"), read_labels(folder / "test_labels.i64")};
  check_pair(data.train_images, data.train_labels, "train");
  check_pair(data.test_images, data.test_labels, "test");
  return data;
}

}  // namespace digits
