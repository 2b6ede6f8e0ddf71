// SPDX-License-Identifier: BSD-3-Clause
// Lists of tensors for the tests of the update kernels.
#pragma once

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "update_data.h"

namespace torchfuse::kernels::testing {

/// Sizes around multiples of vectors and warps, the largest tensor of a warp, and chunks.
inline std::vector<std::int64_t> border_sizes(std::int64_t vec, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::set<std::int64_t> sizes;
  for (const std::int64_t border : {0l, 32l, 32 * vec, 512l}) {
    for (std::int64_t distance = -vec - 1; distance <= vec + 1; ++distance) {
      if (border + distance >= 0) sizes.insert(border + distance);
    }
  }
  const std::int64_t chunk = 256 * vec;
  for (const std::int64_t border : {chunk, 2 * chunk, 3 * chunk}) {
    const std::int64_t some = 1 + static_cast<std::int64_t>(random()) % vec;
    for (const std::int64_t distance : {-some, -1l, 0l, 1l, some, 17l}) {
      sizes.insert(border + distance);
    }
  }
  return {sizes.begin(), sizes.end()};
}

/// Tensors of these sizes, in random order, groups and steps in turn.
inline std::vector<UpdateTensor> tensors_of(std::vector<std::int64_t> sizes, std::int32_t groups,
                                            std::uint32_t seed) {
  constexpr float kSteps[] = {1.0f, 2.0f, 7.0f, 1000.0f, 123457.0f};
  std::shuffle(sizes.begin(), sizes.end(), std::mt19937(seed));
  std::vector<UpdateTensor> tensors;
  std::uint32_t number = 0;
  for (const std::int64_t numel : sizes) {
    tensors.push_back({numel, static_cast<std::int32_t>(number) % groups,
                       kSteps[number % std::size(kSteps)], 1000 * seed + number});
    ++number;
  }
  return tensors;
}

/// Mostly small sizes, as models have them.
inline std::vector<std::int64_t> random_sizes(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::int64_t> sizes(count);
  for (std::int64_t& size : sizes) {
    const std::uint32_t limit = random() % 32 == 0 ? 3000 : random() % 8 == 0 ? 700 : 40;
    size = random() % limit;
  }
  return sizes;
}

}  // namespace torchfuse::kernels::testing
