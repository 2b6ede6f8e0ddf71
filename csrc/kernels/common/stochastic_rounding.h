// SPDX-License-Identifier: BSD-3-Clause
// Rounds to bf16 at random, without bias and reproducibly.
//
// Note [Stochastic rounding]
// A value lies between two neighboring bf16 values. The probability of rounding away from zero is
// the distance to the neighbor nearer to zero, divided by the distance between both neighbors. On
// average the value is preserved: changes too small for the format are not lost but applied less
// often. A bf16 is the upper half of a float, so adding 16 random bits to the float's bits carries
// into the upper half with exactly this probability. The random bits depend only on seed,
// parameter, step and element. Threads, order and devices do not change the bits. If a parameter is
// sharded over processes, elements are numbered in the full parameter, so that every sharding draws
// the same bits.
#pragma once

#include <cstdint>

#include "kernels/common/float16.h"
#include "kernels/common/macros.h"

namespace torchfuse::kernels {

/// Data that one parameter's elements share in one step.
struct RoundingKey {
  std::uint32_t key;
  std::uint32_t counter;
};

/// Where a shard's elements are in the full parameter: in runs at equal distances.
struct ElementNumbers {
  std::int64_t first;   ///< number of the shard's first element
  std::int64_t run;     ///< elements per run; 0: the shard is one run
  std::int64_t stride;  ///< distance between the first elements of two runs

  TORCHFUSE_HOST_DEVICE std::int64_t of(std::int64_t element) const {
    if (run == 0) return first + element;
    return first + element / run * stride + element % run;
  }
  bool operator==(const ElementNumbers&) const = default;
};

/// Like ElementNumbers, for a chunk. A chunk has fewer than 2^32 elements, so no 64-bit division is
/// needed.
struct ChunkNumbers {
  std::int64_t first;  ///< number of the chunk's first element
  std::int64_t gap;    ///< numbers skipped between two runs
  std::uint32_t left;  ///< the chunk's elements before its second run
  std::uint32_t run;   ///< elements per run

  /// Returns the numbers for the chunk that begins at element `begin` of the shard.
  TORCHFUSE_HOST_DEVICE static ChunkNumbers of(const ElementNumbers& numbers, std::int64_t begin) {
    if (numbers.run == 0) return {numbers.first + begin, 0, kMany, kMany};
    return {numbers.of(begin), numbers.stride - numbers.run,
            fitted(numbers.run - begin % numbers.run), fitted(numbers.run)};
  }

 private:
  static constexpr std::uint32_t kMany = 0xFFFFFFFFu;
  TORCHFUSE_HOST_DEVICE static std::uint32_t fitted(std::int64_t elements) {
    return elements < kMany ? static_cast<std::uint32_t>(elements) : kMany;
  }
};

/// Iterates over a chunk's element numbers, with a single division.
class NumberWalk {
 public:
  TORCHFUSE_HOST_DEVICE NumberWalk(const ChunkNumbers& chunk, std::uint32_t element)
      : chunk_(chunk), number_(chunk.first + element), left_(chunk.left - element) {
    if (element < chunk.left) return;
    const std::uint32_t behind = element - chunk.left;
    number_ += (1 + behind / chunk.run) * chunk.gap;
    left_ = chunk.run - behind % chunk.run;
  }

  TORCHFUSE_HOST_DEVICE std::uint64_t next() {
    const std::int64_t number = number_++;
    if (--left_ == 0) {
      number_ += chunk_.gap;
      left_ = chunk_.run;
    }
    return static_cast<std::uint64_t>(number);
  }

 private:
  const ChunkNumbers& chunk_;
  std::int64_t number_;
  std::uint32_t left_;  ///< remaining elements of the run
};

constexpr std::uint32_t kPhiloxMultiplier = 0xD256D193u;
constexpr std::uint32_t kPhiloxIncrement = 0x9E3779B9u;
constexpr int kPhiloxRounds = 7;

struct PhiloxWords {
  std::uint32_t first;
  std::uint32_t second;
};

/// Philox2x32-7, a counter-based generator: a bijection of the counter for every key (Salmon et
/// al., "Parallel random numbers: as easy as 1, 2, 3", 2011, where 7 rounds pass every test of
/// BigCrush).
TORCHFUSE_HOST_DEVICE PhiloxWords philox(PhiloxWords counter, std::uint32_t key) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const std::uint64_t product = static_cast<std::uint64_t>(kPhiloxMultiplier) * counter.first;
    counter = {static_cast<std::uint32_t>(product >> 32) ^ key ^ counter.second,
               static_cast<std::uint32_t>(product)};
    key += kPhiloxIncrement;
  }
  return counter;
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
/// generators", 2014): every bit of the result depends on every bit of the argument.
TORCHFUSE_HOST_DEVICE std::uint64_t mix_bits(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

TORCHFUSE_HOST_DEVICE RoundingKey rounding_key(std::uint64_t seed, std::uint64_t param,
                                               std::uint64_t step) {
  constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15ull;
  const std::uint64_t mixed =
      mix_bits(mix_bits(mix_bits(seed + kGolden) + param + kGolden) + step + kGolden);
  return {static_cast<std::uint32_t>(mixed >> 32), static_cast<std::uint32_t>(mixed)};
}

/// Returns 16 random bits for an element, numbered in the full parameter's memory order.
TORCHFUSE_HOST_DEVICE std::uint32_t random_16(RoundingKey key, std::uint64_t element) {
  const PhiloxWords counter{static_cast<std::uint32_t>(element),
                            static_cast<std::uint32_t>(element >> 32) + key.counter};
  return philox(counter, key.key).first >> 16;
}

/// Rounds `value` to a bf16 neighbor. Values that are already bf16, including infinities, stay; a
/// NaN becomes 0x7fc0. Beyond the largest bf16, the neighbor away from zero is infinite.
TORCHFUSE_HOST_DEVICE BFloat16 round_stochastically(float value, std::uint32_t random) {
  const std::uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return BFloat16{0x7fc0};
  return BFloat16{static_cast<std::uint16_t>((bits + random) >> 16)};
}

}  // namespace torchfuse::kernels
