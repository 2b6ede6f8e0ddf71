// SPDX-License-Identifier: BSD-3-Clause
// What tests of the fused update are made of: lists of tensors, contents, hyper-parameters.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "device.h"
#include "kernels/functors/adam.h"
#include "kernels/update_tuple.h"

namespace torchfuse::kernels::testing {

/// One tensor of a list. Its contents depend on nothing but `seed`, `numel` and the dtypes.
struct UpdateTensor {
  std::int64_t numel = 0;
  std::int32_t group = 0;
  float step = 1.0f;
  std::uint32_t seed = 0;
};

inline std::vector<float> steps_of(const std::vector<UpdateTensor>& tensors) {
  std::vector<float> steps;
  for (const UpdateTensor& tensor : tensors) steps.push_back(tensor.step);
  return steps;
}

/// Random elements, with others at the borders of tensors, warps and chunks: zeros, the ends of the
/// formats' ranges, infinities, NaN.
inline void fill_part(Buffer& buffer, std::int64_t begin, std::int64_t numel, Part part,
                      std::uint32_t seed) {
  using Limits = std::numeric_limits<float>;
  constexpr double kSpecial[] = {0.0,
                                 -0.0,
                                 Limits::infinity(),
                                 -Limits::infinity(),
                                 Limits::quiet_NaN(),
                                 Limits::max(),
                                 -Limits::max(),
                                 Limits::min(),
                                 -Limits::min(),
                                 Limits::denorm_min(),
                                 -1e-40,
                                 1e-30,
                                 -1e25,
                                 65504.0,
                                 6e-8,
                                 1.0,
                                 1e300,
                                 -1e-310};
  // The last two are for fp64.
  const std::size_t specials = std::size(kSpecial) - (buffer.dtype() == DType::kFloat64 ? 0 : 2);
  constexpr double kScale[kParts] = {2.0, 1.0, 0.1, 0.01, 0.01, 2.0, 2.0};
  constexpr std::int64_t kBorder = 512;
  constexpr std::int64_t kNear = 17;
  std::minstd_rand random(seed * 2654435761u + static_cast<std::uint32_t>(part));
  const auto dice = [&] { return static_cast<std::size_t>(random() >> 8); };
  for (std::int64_t i = 0; i < numel; ++i) {
    double value = (static_cast<double>(random()) * 0x1p-30 - 1.0) * kScale[part];
    if (part == kSecond || part == kMaximum) value = std::abs(value);
    const std::int64_t distance = std::min({i % kBorder, kBorder - 1 - i % kBorder, numel - 1 - i});
    if (distance < kNear && dice() % 8 == 0) value = kSpecial[dice() % specials];
    buffer.set(begin + i, value);
  }
}

/// By part, the tensors one after the other.
using Contents = std::vector<Buffer>;

inline Contents first_contents(const UpdateTuple& tuple, const std::vector<UpdateTensor>& tensors) {
  std::int64_t total = 0;
  for (const UpdateTensor& tensor : tensors) total += tensor.numel;
  Contents contents;
  for (int p = 0; p < kParts; ++p) {
    const Part part = static_cast<Part>(p);
    Buffer& buffer = contents.emplace_back(tuple.dtype(part), total);
    if (part == kParam && tuple.has_master) {
      // Output only: whatever is there must not matter, and must not be taken for a result.
      for (std::int64_t i = 0; i < total; ++i) buffer.set(i, 5.5);
      continue;
    }
    std::int64_t begin = 0;
    for (const UpdateTensor& tensor : tensors) {
      fill_part(buffer, begin, tensor.numel, part, tensor.seed);
      begin += tensor.numel;
    }
  }
  return contents;
}

/// The first of `count` elements from `begin` on in which both differ, NaN payloads aside; or
/// `count`.
inline std::int64_t first_difference(const Buffer& a, const Buffer& b, std::int64_t begin,
                                     std::int64_t count) {
  const auto size = static_cast<std::int64_t>(size_of(a.dtype()));
  const char* const a_bytes = static_cast<const char*>(a.data()) + begin * size;
  const char* const b_bytes = static_cast<const char*>(b.data()) + begin * size;
  for (std::int64_t i = 0; i < count; ++i) {
    if (std::memcmp(a_bytes + i * size, b_bytes + i * size, static_cast<std::size_t>(size)) == 0) {
      continue;
    }
    if (!std::isnan(a.get(begin + i)) || !std::isnan(b.get(begin + i))) return i;
  }
  return count;
}

/// Hyper-parameters unlike those of any other `number`, in mode `number` % 16.
inline AdamParams distinct_group(int number) {
  AdamParams group;
  group.lr.value = 1e-3 * (1 + number);
  group.beta1.value = 0.9 - 1e-3 * number;
  group.beta2.value = 0.999 - 1e-4 * number;
  group.eps.value = 1e-8 * (1 + number % 3);
  group.weight_decay.value = number % 5 == 0 ? 0.0 : 0.01 * number;
  group.amsgrad = (number & 1) == 0;
  group.bias_correction = (number & 2) == 0;
  group.adam_w_mode = (number & 4) == 0;
  group.maximize = (number & 8) != 0;
  return group;
}

/// Parameter groups as the host and as the device see them.
class UpdateGroups {
 public:
  enum class Passed { kByValue, kByPointer };

  /// kByPointer: two of three hyper-parameters, as float and as double in turn.
  explicit UpdateGroups(std::vector<AdamParams> groups, Passed passed = Passed::kByValue)
      : host_(std::move(groups)), device_(host_) {
    constexpr ScalarParam AdamParams::* kFields[] = {&AdamParams::lr, &AdamParams::beta1,
                                                     &AdamParams::beta2, &AdamParams::eps,
                                                     &AdamParams::weight_decay};
    if (passed == Passed::kByValue) return;
    std::vector<ScalarParam*> in_float, in_double;
    std::vector<float> floats;
    std::vector<double> doubles;
    int number = 0;
    for (std::size_t g = 0; g < host_.size(); ++g) {
      for (const auto field : kFields) {
        ScalarParam& on_host = host_[g].*field;
        ScalarParam& on_device = device_[g].*field;
        if (++number % 3 == 0) continue;
        if (number % 3 == 1) {
          floats.push_back(static_cast<float>(on_host.value));
          on_host.value = static_cast<double>(floats.back());
          in_float.push_back(&on_device);
        } else {
          doubles.push_back(on_host.value);
          in_double.push_back(&on_device);
        }
        on_device.value = std::numeric_limits<double>::quiet_NaN();  // to be ignored
      }
    }
    floats_ = std::make_unique<DeviceArray<float>>(floats);
    doubles_ = std::make_unique<DeviceArray<double>>(doubles);
    for (std::size_t i = 0; i < in_float.size(); ++i) in_float[i]->pointer = floats_->data() + i;
    for (std::size_t i = 0; i < in_double.size(); ++i) {
      in_double[i]->pointer = doubles_->data() + i;
      in_double[i]->dtype = DType::kFloat64;
    }
  }

  /// Groups 0 to count - 1 of distinct_group().
  static UpdateGroups distinct(int count, Passed passed = Passed::kByValue) {
    std::vector<AdamParams> groups;
    for (int i = 0; i < count; ++i) groups.push_back(distinct_group(i));
    return UpdateGroups(std::move(groups), passed);
  }

  const std::vector<AdamParams>& on_host() const { return host_; }
  const std::vector<AdamParams>& on_device() const { return device_; }
  std::int32_t count() const { return static_cast<std::int32_t>(host_.size()); }

 private:
  std::vector<AdamParams> host_;
  std::vector<AdamParams> device_;
  std::unique_ptr<DeviceArray<float>> floats_;
  std::unique_ptr<DeviceArray<double>> doubles_;
};

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
