// SPDX-License-Identifier: BSD-3-Clause
// Represents tensors as matrices: contiguous rows, with vectors of one number per column or row.
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

/// Returns the type in which rows are computed: fp64 for fp64, otherwise fp32.
at::ScalarType compute_type(at::ScalarType type);

/// Checks and returns `dtype`, or returns the input's dtype if `dtype` is absent. A 16-bit input
/// can have an fp32 output.
at::ScalarType output_type(const char* op, at::ScalarType input,
                           std::optional<at::ScalarType> dtype);

/// Checks that `normalized_dims` is at least 1 and at most the input's number of dimensions.
void check_normalized_dims(const char* op, const at::Tensor& input, std::int64_t normalized_dims);

/// Checks that `vector` has the sizes of the input's last `normalized_dims` dimensions and is on
/// the input's device. Sizes may be symbolic.
void check_columns(const Argument& argument, const at::Tensor& vector, const at::Tensor& input,
                   std::int64_t normalized_dims);

/// A tensor as a contiguous matrix; copied if the tensor is not contiguous.
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

  /// Returns a vector of one number per column, owned by `holder`. A vector that is not contiguous,
  /// or whose type the kernels do not read, is copied.
  kernels::ChannelInput columns_input(const char* name, const std::optional<at::Tensor>& vector,
                                      at::Tensor& holder) const;
  /// Returns the rows' statistics. Checks that `tensor` is like the forward pass's result.
  const void* statistics(const char* name, const at::Tensor& tensor) const;

 private:
  const char* op_;
  std::int64_t normalized_dims_;
  at::Tensor tensor_;
  std::int64_t rows_ = 1;
  std::int64_t columns_ = 1;
};

/// Returns the minimum number of rows per thread.
std::int64_t rows_grain(std::int64_t columns);

/// Runs kernel(isa, args, begin, end) over all rows on torch's threads.
template <class Kernel, class Args>
void parallel_over_rows(const MatrixInput& source, const Kernel& kernel, const Args& args) {
  const kernels::CpuIsa isa = current_cpu_isa();
  at::parallel_for(0, source.rows(), rows_grain(source.columns()),
                   [&](std::int64_t begin, std::int64_t end) { kernel(isa, args, begin, end); });
}

/// Calls kLauncher(args, multiprocessors, stream). Throws if a row is too long for 32-bit indices.
template <auto kLauncher, class Args>
void launch_over_rows([[maybe_unused]] const char* op, [[maybe_unused]] const MatrixInput& source,
                      [[maybe_unused]] const Args& args) {
#if defined(TORCHFUSE_WITH_CUDA)
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  TORCH_CHECK(source.columns() <= kMost, op, ": expected rows of at most ", kMost,
              " elements on CUDA, got ", source.columns(), ". Split the rows.");
  check_status(op, kLauncher(args, multiprocessors_of(op, source.device()),
                             current_stream(source.device())));
#endif
}

}  // namespace torchfuse::ops
