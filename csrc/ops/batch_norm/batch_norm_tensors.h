// SPDX-License-Identifier: BSD-3-Clause
// What the batch normalization ops make of their tensors: layout, strides, one number per channel.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "kernels/batch_norm.h"
#include "ops/check.h"

namespace torchfuse::ops {

/// kPlanes: the elements of a channel of a sample are contiguous. kRows: the channels of a pixel
/// are, and pixels lie at one distance. kNeither is copied.
enum class BatchNormLayout { kPlanes, kRows, kNeither };

/// Works for symbolic sizes.
BatchNormLayout batch_norm_layout(const at::Tensor& tensor);

/// Uninitialized, with the sizes of `tensor`, dense in `layout`.
at::Tensor empty_batch_norm_tensor(const at::Tensor& tensor, BatchNormLayout layout);

/// The input of a batch normalization, readable by the kernels.
class BatchNormSource {
 public:
  /// Checks, and copies a tensor that is laid out in neither way, with a warning.
  BatchNormSource(const char* op, const at::Tensor& input);

  const at::Tensor& tensor() const { return input_; }
  BatchNormLayout layout() const { return layout_; }
  const kernels::BatchNormShape& shape() const { return shape_; }
  std::int64_t channels() const { return shape_.channels; }
  c10::Device device() const { return input_.device(); }
  kernels::BatchNormInput kernel_input() const { return strided(input_); }

  /// Another tensor of the same sizes, dtype and device. It is copied, into `holder`, if it is laid
  /// out differently: gradients come as the next layer made them.
  kernels::BatchNormInput matching(const char* name, const at::Tensor& tensor,
                                   at::Tensor& holder) const;

  /// One number for each channel; absent if `vector` is.
  kernels::ChannelInput channel_input(const char* name,
                                      const std::optional<at::Tensor>& vector) const;
  kernels::ChannelOutput channel_output(const char* name,
                                        const std::optional<at::Tensor>& vector) const;
  /// `size` fp64 numbers, as an op before this one returned them.
  const double* doubles(const char* name, const at::Tensor& tensor, std::int64_t size) const;

  /// Uninitialized, laid out as the input; see Note [Huge pages].
  at::Tensor empty_like_input() const;
  at::Tensor empty_doubles(std::int64_t size) const;
  /// Room for `rows` terms in the compute type.
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
