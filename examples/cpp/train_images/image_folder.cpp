// SPDX-License-Identifier: BSD-3-Clause
#include "image_folder.h"

#include <dirent.h>

#include <algorithm>
#include <fstream>
#include <stdexcept>

namespace images {
namespace {

struct Close {
  void operator()(DIR* folder) const { closedir(folder); }
};

/// The names in a folder that end so, in order, without hidden ones.
std::vector<std::string> names_in(const std::string& folder, const std::string& ending = "") {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, Close> entries(opendir(folder.c_str()));
  if (entries == nullptr) throw std::runtime_error("expected a folder, got " + folder);
  while (const dirent* entry = readdir(entries.get())) {
    const std::string name = entry->d_name;
    if (name[0] != '.' && name.ends_with(ending)) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// A binary PGM file: "P5", width, height, the largest value, and a byte for each pixel.
torch::Tensor read_pgm(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string kind;
  std::int64_t width = 0;
  std::int64_t height = 0;
  int largest = 0;
  file >> kind >> width >> height >> largest;
  file.get();
  if (!file || kind != "P5" || largest != 255 || width <= 0 || height <= 0) {
    throw std::runtime_error("expected a binary PGM file with 8 bits, got " + path);
  }
  torch::Tensor pixels = torch::empty({1, height, width}, torch::kByte);
  file.read(static_cast<char*>(pixels.mutable_data_ptr()), pixels.numel());
  if (!file)
    throw std::runtime_error("expected " + std::to_string(pixels.numel()) +
                             " pixels, got fewer in " + path);
  return pixels;
}

/// The splitmix64 generator, one number for each image and epoch.
std::uint64_t random_bits(std::uint64_t seed, std::uint64_t epoch, std::uint64_t index) {
  std::uint64_t state = seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03 + index + 1;
  state *= 0x9E3779B97F4A7C15;
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EB;
  return state ^ (state >> 31);
}

/// Moves an image on black and makes it darker or brighter; pixels are from 0 to 255.
torch::Tensor augment(const torch::Tensor& pixels, std::uint64_t bits) {
  const auto down = static_cast<std::int64_t>((bits & 0xFF) % 3);
  const auto right = static_cast<std::int64_t>((bits >> 8 & 0xFF) % 3);
  const torch::Tensor padded = torch::constant_pad_nd(pixels, {1, 1, 1, 1});
  const torch::Tensor moved =
      padded.narrow(1, down, pixels.size(1)).narrow(2, right, pixels.size(2));
  return (moved * (0.8 + 0.4 * static_cast<double>(bits >> 16 & 0xFFFF) / 0xFFFF)).clamp_max(255);
}

}  // namespace

ImageFolder::ImageFolder(const std::string& folder, std::optional<std::uint64_t> seed)
    : seed_(seed) {
  for (const std::string& label : names_in(folder)) {
    ++classes_;
    for (const std::string& name : names_in(folder + "/" + label, ".pgm")) {
      files_.emplace_back(folder + "/" + label + "/" + name, std::stoll(label));
    }
  }
  if (files_.empty()) throw std::runtime_error("expected images in " + folder + ", got none");
}

torch::data::Example<> ImageFolder::get(std::size_t index) {
  const auto& [file, label] = files_.at(index);
  torch::Tensor pixels = read_pgm(file).to(torch::kFloat);
  if (seed_) {
    pixels = augment(pixels, random_bits(*seed_, static_cast<std::uint64_t>(*epoch_), index));
  }
  return {pixels / 127.5 - 1, torch::tensor(label)};
}

}  // namespace images
