// SPDX-License-Identifier: BSD-3-Clause
// Tensors as matrices: rows of contiguous elements, with one number per column or row.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <limits>
#include <optional>

#include "kernels/common/channel_vector.h"
#include "ops/backend.h"
#include "ops/check.h"

namespace torchfuse::ops {

/// fp64 for fp64, else fp32: what rows are computed in.
at::ScalarType compute_type(at::ScalarType type);

/// `dtype`, or the input's, after a check: a 16-bit input can have an fp32 output.
at::ScalarType output_type(const char* op, at::ScalarType input,
                           std::optional<at::ScalarType> dtype);

/// `normalized_dims` is at least 1 and at most the number of dimensions.
void check_normalized_dims(const char* op, const at::Tensor& input, std::int64_t normalized_dims);

/// Has the sizes of the input's last `normalized_dims` dimensions, and is on its device. Sizes may
/// be symbolic.
void check_columns(const Argument& argument, const at::Tensor& vector, const at::Tensor& input,
                   std::int64_t normalized_dims);

/// A tensor as a matrix: contiguous, copied where it is not.
class MatrixInput {
 public:
  MatrixInput(const char* op, const char* name, const at::Tensor& tensor,
              std::int64_t normalized_dims);

  const at::Tensor& tensor() const { return tensor_; }
  c10::Device device() const { return tensor_.device(); }
  std::int64_t rows() const { return rows_; }
  std::int64_t columns() const { return columns_; }
  bool is_empty() const { return rows_ == 0 || columns_ == 0; }
  at::TensorOptions compute_options() const {
    return tensor_.options().dtype(compute_type(tensor_.scalar_type()));
  }

  /// One number for each column. It is converted, into `holder`, if it is not contiguous or of a
  /// type that the kernels do not read.
  kernels::ChannelInput columns_input(const char* name, const std::optional<at::Tensor>& vector,
                                      at::Tensor& holder) const;
  /// The statistics of the rows, as the forward pass returned them.
  const void* statistics(const char* name, const at::Tensor& tensor) const;

 private:
  const char* op_;
  std::int64_t normalized_dims_;
  at::Tensor tensor_;
  std::int64_t rows_ = 1;
  std::int64_t columns_ = 1;
};

/// Rows that a thread takes at least.
std::int64_t rows_grain(std::int64_t columns);

/// Runs kernel(isa, args, begin, end) over all rows on torch's threads.
template <class Kernel, class Args>
void parallel_over_rows(const MatrixInput& source, const Kernel& kernel, const Args& args) {
  const kernels::CpuIsa isa = current_cpu_isa();
  at::parallel_for(0, source.rows(), rows_grain(source.columns()),
                   [&](std::int64_t begin, std::int64_t end) { kernel(isa, args, begin, end); });
}

/// Calls kLauncher(args, multiprocessors, stream); fails for rows that 32-bit indices do not reach.
template <auto kLauncher, class Args>
void launch_over_rows([[maybe_unused]] const char* op, [[maybe_unused]] const MatrixInput& source,
                      [[maybe_unused]] const Args& args) {
#if defined(TORCHFUSE_WITH_CUDA)
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  TORCH_CHECK(source.columns() <= kMost, op, ": expected rows of at most ", kMost,
              " elements on CUDA, got ", source.columns(), ". Split them.");
  check_status(op, kLauncher(args, multiprocessors_of(op, source.device()),
                             current_stream(source.device())));
#endif
}

}  // namespace torchfuse::ops
