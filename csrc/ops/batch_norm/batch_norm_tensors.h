// SPDX-License-Identifier: BSD-3-Clause
// Prepares the batch normalization ops' tensors: layout, strides, one number per channel.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "kernels/batch_norm.h"
#include "ops/check.h"

namespace torchfuse::ops {

/// kPlanes: each sample's channels are contiguous planes. kRows: each pixel's channels are
/// contiguous, and pixels are evenly spaced. kNeither: any other layout, which is copied.
enum class BatchNormLayout { kPlanes, kRows, kNeither };

/// Returns the tensor's layout. Sizes may be symbolic.
BatchNormLayout batch_norm_layout(const at::Tensor& tensor);

/// Returns an uninitialized tensor with the sizes of `tensor`, dense in `layout`.
at::Tensor empty_batch_norm_tensor(const at::Tensor& tensor, BatchNormLayout layout);

/// A batch normalization's input, readable by the kernels.
class BatchNormSource {
 public:
  /// Checks the input. An input whose layout is kNeither is copied, with a warning.
  BatchNormSource(const char* op, const at::Tensor& input);

  const at::Tensor& tensor() const { return input_; }
  BatchNormLayout layout() const { return layout_; }
  const kernels::BatchNormShape& shape() const { return shape_; }
  std::int64_t channels() const { return shape_.channels; }
  c10::Device device() const { return input_.device(); }
  kernels::BatchNormInput kernel_input() const { return strided(input_); }

  /// Returns another tensor of the same sizes, dtype and device. If the layout differs, the tensor
  /// is copied into `holder`: the next layer determines a gradient's layout.
  kernels::BatchNormInput matching(const char* name, const at::Tensor& tensor,
                                   at::Tensor& holder) const;

  /// Returns one number per channel, or nothing if `vector` is absent.
  kernels::ChannelInput channel_input(const char* name,
                                      const std::optional<at::Tensor>& vector) const;
  kernels::ChannelOutput channel_output(const char* name,
                                        const std::optional<at::Tensor>& vector) const;
  /// Returns `size` fp64 numbers from an earlier op's result.
  const double* doubles(const char* name, const at::Tensor& tensor, std::int64_t size) const;

  /// Returns an uninitialized tensor with the input's layout; see Note [Huge pages].
  at::Tensor empty_like_input() const;
  at::Tensor empty_doubles(std::int64_t size) const;
  /// Returns room for `rows` terms in the compute type.
  at::Tensor empty_terms(std::int64_t rows) const;

 private:
  kernels::BatchNormInput strided(const at::Tensor& tensor) const;
  void check_channel_vector(const char* name, const at::Tensor& vector) const;

  const char* op_;
  at::Tensor input_;
  BatchNormLayout layout_ = BatchNormLayout::kPlanes;
  kernels::BatchNormShape shape_;
};

}  // namespace torchfuse::ops
