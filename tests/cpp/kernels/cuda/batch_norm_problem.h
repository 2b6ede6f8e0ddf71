// SPDX-License-Identifier: BSD-3-Clause
// Batch normalization on the device: tensors of both layouts, workspaces, and one call for each of
// the four launches.
#pragma once

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "gradient_list.h"
#include "kernels/batch_norm_backward.h"
#include "kernels/batch_norm_pass.h"

namespace torchfuse::kernels::testing {

struct Strides {
  std::int64_t channel_gap = 0;  ///< elements between planes; none between channels of a row
  std::int64_t outer_gap = 0;    ///< elements between samples or rows
  std::int64_t offset = 0;       ///< elements behind a 16-byte boundary
};

/// For every element: its sample or row, its channel, its place in the plane.
template <class Body>
void for_each_place(const BatchNormShape& shape, const Body& body) {
  for (std::int64_t o = 0; o < shape.outer; ++o) {
    for (std::int64_t c = 0; c < shape.channels; ++c) {
      for (std::int64_t i = 0; i < shape.inner; ++i) body(o, c, i);
    }
  }
}

/// A tensor that kernels read or write; NaN in its gaps. Nothing is on the device before upload().
class ChannelTensor {
 public:
  ChannelTensor(const BatchNormShape& shape, const Strides& strides = {})
      : channel_stride_(shape.inner + (shape.channels_last ? 0 : strides.channel_gap)),
        outer_stride_(shape.channels * channel_stride_ + strides.outer_gap),
        host_(shape.dtype, shape.numel() == 0
                               ? 0
                               : (shape.outer - 1) * outer_stride_ +
                                     (shape.channels - 1) * channel_stride_ + shape.inner),
        device_(DeviceTensor::unwritten(host_.dtype(), host_.numel(), strides.offset)) {
    for (std::int64_t i = 0; i < host_.numel(); ++i) host_.set(i, std::nan(""));
  }

  static ChannelTensor normal(const BatchNormShape& shape, std::mt19937& random, double mean = 0.0,
                              double sigma = 1.0, const Strides& strides = {}) {
    ChannelTensor tensor(shape, strides);
    std::normal_distribution<double> numbers(mean, sigma);
    for_each_place(shape, [&](auto o, auto c, auto i) { tensor.set(o, c, i, numbers(random)); });
    tensor.upload();
    return tensor;
  }

  double get(std::int64_t o, std::int64_t c, std::int64_t i) const {
    return host_.get(o * outer_stride_ + c * channel_stride_ + i);
  }
  void set(std::int64_t o, std::int64_t c, std::int64_t i, double value) {
    host_.set(o * outer_stride_ + c * channel_stride_ + i, value);
  }
  /// Puts the contents onto the device, and the counts of accesses to zero.
  void upload() const { device_.upload(host_.data()); }
  void download() { device_.download(host_.data()); }

  BatchNormInput input() const { return {data(), outer_stride_, channel_stride_}; }
  BatchNormInput host_input() const { return {host_.data(), outer_stride_, channel_stride_}; }
  void* data() const { return host_.numel() == 0 ? nullptr : device_.data(); }
  const Buffer& host() const { return host_; }
  const DeviceTensor& device() const { return device_; }
  void expect_accesses(unsigned reads, unsigned writes) const {
    device_.expect_margins_intact();
    device_.expect_accesses(reads, writes);
  }

 private:
  std::int64_t channel_stride_;
  std::int64_t outer_stride_;
  Buffer host_;
  DeviceTensor device_;
};

/// One number for each channel, or nothing.
class ChannelVector {
 public:
  ChannelVector() = default;
  ChannelVector(DType dtype, std::int64_t channels, const std::function<double()>& number)
      : host_(std::make_unique<Buffer>(dtype, channels)) {
    for (std::int64_t c = 0; c < channels; ++c) host_->set(c, number());
    device_ = std::make_unique<DeviceTensor>(*host_);
  }

  double device_value(std::int64_t c) const { return device_->to_host().get(c); }
  ChannelInput input() const { return {data(), dtype()}; }
  ChannelOutput output() const { return {data(), dtype()}; }
  ChannelInput host_input() const { return {host_ ? host_->data() : nullptr, dtype()}; }
  ChannelOutput host_output() const { return {host_ ? host_->data() : nullptr, dtype()}; }
  void expect_accesses(unsigned reads, unsigned writes) const {
    device_->expect_margins_intact();
    device_->expect_accesses(reads, writes);
  }

 private:
  void* data() const { return device_ ? device_->data() : nullptr; }
  DType dtype() const { return host_ ? host_->dtype() : DType::kFloat32; }

  std::unique_ptr<Buffer> host_;
  std::unique_ptr<DeviceTensor> device_;
};

/// What a launch may use besides its tensors, exactly as large as it says.
class Workspace {
 public:
  explicit Workspace(const BatchNormShape& shape, int multiprocessors = kMultiprocessors)
      : multiprocessors_(multiprocessors),
        partials_(
            DeviceArray<double>::unwritten(batch_norm_workspace_partials(shape, multiprocessors))),
        arrivals_(std::vector<std::uint32_t>(
            static_cast<std::size_t>(batch_norm_workspace_arrivals(shape)), 0u)) {}

  BatchNormWorkspace get() const { return {partials_.data(), arrivals_.data(), multiprocessors_}; }
  /// For the elementwise passes, which are launched with no more than they use.
  BatchNormWorkspace arrivals_alone() const {
    return {nullptr, arrivals_.data(), multiprocessors_};
  }
  BatchNormWorkspace multiprocessors_alone() const { return {nullptr, nullptr, multiprocessors_}; }

  void expect_ready_again() const {
    partials_.expect_margins_intact();
    arrivals_.expect_margins_intact();
    for (const std::uint32_t arrivals : arrivals_.to_host()) ASSERT_EQ(arrivals, 0u);
  }

 private:
  int multiprocessors_;
  DeviceArray<double> partials_;
  DeviceArray<std::uint32_t> arrivals_;
};

inline void expect_ok(const Status& status, const Workspace& workspace) {
  ASSERT_NO_FATAL_FAILURE(expect_ok(status));
  workspace.expect_ready_again();
}

inline std::vector<double> stats_of(const BatchNormShape& shape, const ChannelTensor& x) {
  const Workspace workspace(shape);
  const auto packed = DeviceArray<double>::unwritten(packed_moments_size(shape.channels));
  BatchNormStatsArgs args;
  args.shape = shape;
  args.input = x.input();
  args.packed = packed.data();
  expect_ok(batch_norm_stats_cuda(args, workspace.get(), stream()), workspace);
  packed.expect_margins_intact();
  packed.expect_accesses(0, 1);
  return packed.to_host();
}

/// 113 bits, for variances beside which the square of the mean is large.
using Quad = __float128;

/// Mean and biased variance of a channel.
struct ChannelMoments {
  Quad count = 0;
  Quad mean = 0;
  Quad variance = 0;
};

/// From the elements, in two passes.
inline ChannelMoments moments_of_channel(const BatchNormShape& shape, const ChannelTensor& x,
                                         std::int64_t c) {
  ChannelMoments result;
  const auto for_each = [&](const auto& body) {
    for (std::int64_t o = 0; o < shape.outer; ++o) {
      for (std::int64_t i = 0; i < shape.inner; ++i) body(static_cast<Quad>(x.get(o, c, i)));
    }
  };
  for_each([&](Quad value) { result.mean += value, result.count += 1; });
  if (result.count == 0) return result;
  result.mean /= result.count;
  for_each([&](Quad value) {
    result.variance += (value - result.mean) * (value - result.mean) / result.count;
  });
  return result;
}

/// From what the statistics kernel writes.
inline ChannelMoments moments_of_packed(const std::vector<double>& packed, std::int64_t c) {
  const auto channels = static_cast<std::int64_t>(packed.size() - 1) / 4;
  const auto at = [&](std::int64_t row) {
    return static_cast<Quad>(packed[static_cast<std::size_t>(row * channels + c)]);
  };
  ChannelMoments result;
  result.count = static_cast<Quad>(packed.back());
  result.mean = (at(0) + at(1)) / result.count;
  result.variance = (at(2) + at(3)) / result.count - result.mean * result.mean;
  return result;
}

/// Relative error of sums of a dtype's elements: up to 64 additions in the compute type.
inline double sum_error(DType dtype) { return dtype == DType::kFloat64 ? 1e-14 : 4e-6; }

inline BatchNormShape planes(DType dtype, std::int64_t outer, std::int64_t channels,
                             std::int64_t inner) {
  return {outer, channels, inner, false, dtype};
}
inline BatchNormShape rows(DType dtype, std::int64_t outer, std::int64_t channels) {
  return {outer, channels, 1, true, dtype};
}

/// Both layouts, all dtypes, tiny and large planes, one and several slices and tiles.
inline std::vector<BatchNormShape> every_shape() {
  std::vector<BatchNormShape> shapes;
  std::size_t next = 0;
  const auto dtype = [&] { return kEveryDType[next++ % 4]; };
  for (const std::int64_t channels : {1, 3, 16, 17, 64, 65, 257}) {
    for (const std::int64_t inner : {1, 4, 49, 64, 1024}) {
      const std::int64_t outer = inner < 49 ? 70 : inner < 1024 ? 21 : 5;
      shapes.push_back(planes(dtype(), channels > 64 ? 3 : outer, channels, inner));
    }
    ++next;
    for (const std::int64_t outer : {1, 100, 700}) shapes.push_back(rows(dtype(), outer, channels));
    for (const DType each : kEveryDType) shapes.push_back(rows(each, 65, channels));
  }
  return shapes;
}

/// One shape of each dtype and layout that takes several blocks, quickly.
inline std::vector<BatchNormShape> small_shapes(DType dtype) {
  return {planes(dtype, 40, 3, 7), rows(dtype, 700, 5)};
}

inline ::testing::Message describe(const BatchNormShape& shape) {
  return ::testing::Message() << (shape.channels_last ? "rows " : "planes ") << shape.outer << " x "
                              << shape.channels << " x " << shape.inner << ", dtype "
                              << static_cast<int>(shape.dtype);
}

}  // namespace torchfuse::kernels::testing
