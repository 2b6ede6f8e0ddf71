// SPDX-License-Identifier: BSD-3-Clause
#include "ops/matrix.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

namespace torchfuse::ops {

at::ScalarType compute_type(at::ScalarType type) {
  return type == at::kDouble ? at::kDouble : at::kFloat;
}

at::ScalarType output_type(const char* op, at::ScalarType input,
                           std::optional<at::ScalarType> dtype) {
  if (!dtype || *dtype == input || *dtype == compute_type(input)) return dtype.value_or(input);
  fail({op, "dtype"}, c10::str("be ", input, ", the input's, or ", compute_type(input)),
       c10::str(*dtype), "Convert the result with to().");
}

void check_normalized_dims(const char* op, const at::Tensor& input, std::int64_t normalized_dims) {
  if (normalized_dims >= 1 && normalized_dims <= input.dim()) return;
  fail({op, "normalized_dims"}, c10::str("be from 1 to ", input.dim(), ", the input's dimensions"),
       c10::str(normalized_dims));
}

void check_columns(const Argument& argument, const at::Tensor& vector, const at::Tensor& input,
                   std::int64_t normalized_dims) {
  check_same_device(argument, vector, input.device(), "input", kMoveTheModule);
  const auto expected =
      input.sym_sizes().slice(static_cast<std::size_t>(input.dim() - normalized_dims));
  if (vector.sym_sizes() == expected) return;
  fail(argument, c10::str("be of shape ", expected, ", the last dimensions of input"),
       c10::str(vector.sym_sizes()), "normalized_shape must equal the input's last dimensions.");
}

MatrixInput::MatrixInput(const char* op, const char* name, const at::Tensor& tensor,
                         std::int64_t normalized_dims)
    : op_(op), normalized_dims_(normalized_dims) {
  check_tensor({op, name}, tensor);
  check_normalized_dims(op, tensor, normalized_dims);
  tensor_ = tensor.resolve_neg().contiguous();
  const std::int64_t leading = tensor.dim() - normalized_dims;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    (d < leading ? rows_ : columns_) *= tensor.size(d);
  }
}

kernels::ChannelInput MatrixInput::columns_input(const char* name,
                                                 const std::optional<at::Tensor>& vector,
                                                 at::Tensor& holder) const {
  if (!vector) return {};
  const Argument argument{op_, name};
  check_tensor(argument, *vector);
  check_columns(argument, *vector, tensor_, normalized_dims_);
  const at::ScalarType own = tensor_.scalar_type();
  const bool readable = vector->scalar_type() == own || vector->scalar_type() == compute_type(own);
  holder = (readable ? *vector : vector->to(compute_type(own))).resolve_neg().contiguous();
  return {holder.const_data_ptr(), dtype_of(argument, holder)};
}

const void* MatrixInput::statistics(const char* name, const at::Tensor& tensor) const {
  const Argument argument{op_, name};
  check_tensor(argument, tensor);
  check_same_device(argument, tensor, device(), "the gradient");
  const at::ScalarType expected = compute_type(tensor_.scalar_type());
  if (tensor.scalar_type() != expected || tensor.numel() != rows_ || !tensor.is_contiguous()) {
    fail(argument, c10::str("be a contiguous ", expected, " tensor of ", rows_, " elements"),
         c10::str(tensor.scalar_type(), " of shape ", tensor.sizes()),
         "Pass the forward pass's result unchanged.");
  }
  return tensor.const_data_ptr();
}

std::int64_t rows_grain(std::int64_t columns) {
  return std::max<std::int64_t>(kGrainSize / std::max<std::int64_t>(columns, 1), 1);
}

}  // namespace torchfuse::ops
