// SPDX-License-Identifier: BSD-3-Clause
#include "ops/batch_norm/batch_norm_tensors.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include "ops/launch/huge_pages.h"

namespace torchfuse::ops {

namespace {

constexpr std::int64_t kSpatial = 2;  ///< the first dimension behind samples and channels

/// Returns whether dimensions [first, dim) are stored one after the other with a distance of `step`
/// between elements.
bool collapses(const at::Tensor& tensor, std::int64_t first, c10::SymInt step) {
  const auto sizes = tensor.sym_sizes();
  const auto strides = tensor.sym_strides();
  for (std::int64_t d = tensor.dim() - 1; d >= first; --d) {
    if (sizes[d] == 1) continue;
    if (strides[d] != step) return false;
    step = step * sizes[d];
  }
  return true;
}

c10::SymInt pixels_of(const at::Tensor& tensor) {
  c10::SymInt pixels = 1;
  for (std::int64_t d = kSpatial; d < tensor.dim(); ++d) pixels = pixels * tensor.sym_size(d);
  return pixels;
}

/// Returns the distance between neighboring pixels, if each pixel's channels are contiguous.
c10::SymInt pixel_stride(const at::Tensor& tensor) {
  for (std::int64_t d = tensor.dim() - 1; d >= kSpatial; --d) {
    if (tensor.sym_size(d) != 1) return tensor.sym_stride(d);
  }
  return tensor.sym_size(0) == 1 ? tensor.sym_size(1) : tensor.sym_stride(0);
}

bool are_rows(const at::Tensor& tensor) {
  if (tensor.sym_size(1) != 1 && tensor.sym_stride(1) != 1) return false;
  const c10::SymInt step = pixel_stride(tensor);
  if (step < tensor.sym_size(1)) return false;
  if (!collapses(tensor, kSpatial, step)) return false;
  return tensor.sym_size(0) == 1 || tensor.sym_stride(0) == step * pixels_of(tensor);
}

bool are_planes(const at::Tensor& tensor) {
  if (!collapses(tensor, kSpatial, 1)) return false;
  const c10::SymInt pixels = pixels_of(tensor);
  if (tensor.sym_size(1) != 1 && tensor.sym_stride(1) < pixels) return false;
  // If samples were stored between the channels, the output would need the same order.
  return tensor.sym_size(0) == 1 || tensor.sym_size(1) == 1 ||
         tensor.sym_stride(0) >= tensor.sym_stride(1) * tensor.sym_size(1);
}

}  // namespace

BatchNormLayout batch_norm_layout(const at::Tensor& tensor) {
  const bool one_pixel = pixels_of(tensor) == 1;
  if (one_pixel && are_rows(tensor)) return BatchNormLayout::kRows;
  if (are_planes(tensor)) return BatchNormLayout::kPlanes;
  return are_rows(tensor) ? BatchNormLayout::kRows : BatchNormLayout::kNeither;
}

at::Tensor empty_batch_norm_tensor(const at::Tensor& tensor, BatchNormLayout layout) {
  // Keep all strides, also of dimensions of size one.
  if (layout != BatchNormLayout::kNeither && tensor.is_non_overlapping_and_dense()) {
    return at::empty_like(tensor);
  }
  const auto sizes = tensor.sym_sizes();
  c10::SymDimVector strides(sizes.size());
  c10::SymInt step = layout == BatchNormLayout::kRows ? tensor.sym_size(1) : c10::SymInt(1);
  for (std::int64_t d = tensor.dim() - 1; d >= kSpatial; --d) {
    strides[d] = step;
    step = step * sizes[d];
  }
  strides[1] = layout == BatchNormLayout::kRows ? c10::SymInt(1) : step;
  strides[0] = layout == BatchNormLayout::kRows ? step : step * sizes[1];
  return at::empty_strided_symint(sizes, strides, tensor.options());
}

BatchNormSource::BatchNormSource(const char* op, const at::Tensor& input) : op_(op), input_(input) {
  const Argument argument{op, "input"};
  if (!input.defined()) fail(argument, "be a tensor", "an undefined tensor");
  if (input.dim() < 2) {
    fail(argument, "have at least 2 dimensions, samples and channels", c10::str(input.sizes()),
         "Add a dimension with input.unsqueeze(0).");
  }
  check_tensor(argument, input);
  if (input.size(1) == 0) fail(argument, "have at least one channel", c10::str(input.sizes()));
  layout_ = batch_norm_layout(input);
  if (layout_ == BatchNormLayout::kNeither) {
    if (input.numel() != 0) {
      TORCH_WARN_ONCE(op, ": the input of sizes ", input.sizes(), " and strides ", input.strides(),
                      " is copied in every call, because neither the pixels of a channel nor the "
                      "channels of a pixel are contiguous. Call contiguous() when creating it.");
    }
    input_ = input.contiguous();
    layout_ = BatchNormLayout::kPlanes;
  }
  shape_.channels_last = layout_ == BatchNormLayout::kRows;
  shape_.channels = input.size(1);
  const std::int64_t pixels = pixels_of(input).expect_int();
  shape_.outer = shape_.channels_last ? input.size(0) * pixels : input.size(0);
  shape_.inner = shape_.channels_last ? 1 : pixels;
  shape_.dtype = dtype_of(argument, input);
}

kernels::BatchNormInput BatchNormSource::strided(const at::Tensor& tensor) const {
  if (shape_.channels_last) {
    return {tensor.const_data_ptr(), pixel_stride(tensor).expect_int(), 1};
  }
  return {tensor.const_data_ptr(), tensor.stride(0), tensor.stride(1)};
}

kernels::BatchNormInput BatchNormSource::matching(const char* name, const at::Tensor& tensor,
                                                  at::Tensor& holder) const {
  const Argument argument{op_, name};
  check_tensor(argument, tensor);
  check_same_sizes(argument, tensor, input_, "input");
  check_same_device(argument, tensor, input_.device(), "input", /*remedy=*/"");
  if (tensor.scalar_type() != input_.scalar_type()) {
    fail(argument, c10::str("be of the dtype of input, ", input_.scalar_type()),
         c10::str(tensor.scalar_type()), "Convert it with to(input.dtype).");
  }
  const bool fits = shape_.channels_last ? are_rows(tensor) : are_planes(tensor);
  holder = tensor;
  if (!fits) {
    holder = empty_like_input();
    holder.copy_(tensor);
  }
  return strided(holder);
}

void BatchNormSource::check_channel_vector(const char* name, const at::Tensor& vector) const {
  const Argument argument{op_, name};
  check_tensor(argument, vector);
  if (vector.dim() != 1 || vector.size(0) != shape_.channels || !vector.is_contiguous()) {
    fail(argument,
         c10::str("be a contiguous tensor of shape [", shape_.channels, "], the channels of input"),
         c10::str("a tensor of shape ", vector.sizes(), " with strides ", vector.strides()),
         "num_features must be input.size(1).");
  }
  check_same_device(argument, vector, input_.device(), "input", kMoveTheModule);
}

kernels::ChannelInput BatchNormSource::channel_input(
    const char* name, const std::optional<at::Tensor>& vector) const {
  if (!vector || !vector->defined()) return {};
  check_channel_vector(name, *vector);
  return {vector->const_data_ptr(), dtype_of({op_, name}, *vector)};
}

kernels::ChannelOutput BatchNormSource::channel_output(
    const char* name, const std::optional<at::Tensor>& vector) const {
  if (!vector || !vector->defined()) return {};
  check_channel_vector(name, *vector);
  check_writable({op_, name}, *vector);
  return {vector->mutable_data_ptr(), dtype_of({op_, name}, *vector)};
}

const double* BatchNormSource::doubles(const char* name, const at::Tensor& tensor,
                                       std::int64_t size) const {
  if (tensor.scalar_type() != at::kDouble || tensor.numel() != size || !tensor.is_contiguous() ||
      tensor.device() != input_.device()) {
    fail({op_, name}, c10::str("hold ", size, " contiguous numbers of dtype double on ", device()),
         c10::str(tensor.numel(), " of dtype ", tensor.scalar_type(), " on ", tensor.device()),
         "Pass the result of the op before this one, for an input with as many channels.");
  }
  return tensor.const_data_ptr<double>();
}

at::Tensor BatchNormSource::empty_like_input() const {
  at::Tensor tensor = empty_batch_norm_tensor(input_, layout_);
  request_huge_pages(tensor);
  return tensor;
}

at::Tensor BatchNormSource::empty_doubles(std::int64_t size) const {
  return at::empty({size}, input_.options().dtype(at::kDouble).memory_format(std::nullopt));
}

at::Tensor BatchNormSource::empty_terms(std::int64_t rows) const {
  const auto dtype = input_.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::empty({rows * shape_.channels}, input_.options().dtype(dtype));
}

}  // namespace torchfuse::ops
