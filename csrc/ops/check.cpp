// SPDX-License-Identifier: BSD-3-Clause
#include "ops/check.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace torchfuse::ops {

namespace {

void check_storage(const Argument& argument, const at::Tensor& tensor) {
  if (!tensor.has_storage() || within_storage(*tensor.unsafeGetTensorImpl())) return;
  fail(argument, "lie within its storage",
       c10::str(tensor.numel(), " elements of ", tensor.itemsize(), " bytes from element ",
                tensor.storage_offset(), " on in a storage of ", tensor.storage().nbytes(),
                " bytes"),
       "The storage was resized: resize it back before the step.");
}

void check_not_negated(const Argument& argument, const at::Tensor& tensor) {
  if (!tensor.is_neg()) return;
  fail(argument, "hold its own values", "a view with the negative bit",
       "Pass tensor.resolve_neg().");
}

}  // namespace

std::string name_of(const Argument& argument) {
  if (argument.group >= 0) {
    const std::string param = c10::str("params[", argument.index, "] of group ", argument.group);
    return *argument.name == '\0' ? param : c10::str(argument.name, " of ", param);
  }
  return argument.index < 0 ? argument.name : c10::str(argument.name, "[", argument.index, "]");
}

void fail(const Argument& argument, const std::string& expected, const std::string& got,
          const char* remedy) {
  TORCH_CHECK(false, argument.op, ": expected ", name_of(argument), " to ", expected, ", got ", got,
              ".", *remedy == '\0' ? "" : " ", remedy);
  __builtin_unreachable();
}

kernels::DType dtype_of(const Argument& argument, const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return kernels::DType::kFloat32;
    case at::kHalf:
      return kernels::DType::kFloat16;
    case at::kBFloat16:
      return kernels::DType::kBFloat16;
    case at::kDouble:
      return kernels::DType::kFloat64;
    default:
      fail(argument, "be of dtype float32, float16, bfloat16 or float64",
           c10::str(tensor.scalar_type()),
           tensor.is_complex() ? "View complex tensors as real with torch.view_as_real." : "");
  }
}

bool within_storage(const c10::TensorImpl& tensor) {
  if (tensor.numel() == 0) return true;
  std::int64_t last = tensor.storage_offset();
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    last += (tensor.sizes()[d] - 1) * tensor.strides()[d];
  }
  const std::size_t end = static_cast<std::size_t>(last + 1) * tensor.itemsize();
  return end <= tensor.unsafe_storage().nbytes();
}

void check_tensor(const Argument& argument, const at::Tensor& tensor) {
  if (!tensor.defined()) fail(argument, "be a tensor", "an undefined tensor");
  if (tensor.layout() != at::kStrided) {
    fail(argument, "be dense", c10::str("a tensor of layout ", tensor.layout()),
         "Sparse gradients are not supported; use torch.optim.SparseAdam for those parameters, or "
         "layers without sparse=True.");
  }
  dtype_of(argument, tensor);
  if (!tensor.is_cpu() && !tensor.is_cuda()) {
    fail(argument, "be on a CPU or CUDA device", c10::str(tensor.device()));
  }
  check_storage(argument, tensor);
  if (tensor.numel() != 0 && tensor.const_data_ptr() == nullptr) {
    fail(argument, "have its own memory", "a null data pointer",
         "Wrapper tensors (DTensor, FakeTensor) must be unwrapped first. A ZeroTensor gets "
         "memory by clone().");
  }
  check_backend(argument.op, tensor.device());
}

void check_dense(const Argument& argument, const at::Tensor& tensor) {
  check_tensor(argument, tensor);
  if (!tensor.is_non_overlapping_and_dense()) {
    fail(argument, "fill its memory without gaps or overlap",
         c10::str("sizes ", tensor.sizes(), " with strides ", tensor.strides()),
         "Pass tensor.contiguous() or a parameter that owns its memory.");
  }
  check_not_negated(argument, tensor);
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  const auto sizes = a.sizes();
  if (!sizes.equals(b.sizes())) return false;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1 && a.strides()[d] != b.strides()[d]) return a.numel() == 0;
  }
  return true;
}

bool overlaps_itself(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return false;
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // (stride, size)
  for (std::int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(dims.begin(), dims.end());
  std::int64_t extent = 1;  // elements spanned by the dimensions so far
  for (const auto& [stride, size] : dims) {
    if (stride < extent) return true;
    extent += (size - 1) * stride;
  }
  return false;
}

void check_same_sizes(const Argument& argument, const at::Tensor& tensor,
                      const at::Tensor& reference, const char* reference_name) {
  if (tensor.sizes().equals(reference.sizes())) return;
  fail(argument, c10::str("have the sizes of ", reference_name, ", ", reference.sizes()),
       c10::str(tensor.sizes()));
}

void check_same_device(const Argument& argument, const at::Tensor& tensor,
                       const c10::Device& device, const char* reference_name, const char* remedy) {
  if (tensor.device() == device) return;
  fail(argument, c10::str("be on the device of ", reference_name, ", ", device),
       c10::str(tensor.device()), remedy);
}

void check_same_length(const char* op, const char* name, std::size_t length, std::size_t expected,
                       const char* reference_name) {
  if (length == expected) return;
  fail(Argument{op, name}, c10::str("have as many tensors as ", reference_name, ", ", expected),
       c10::str(length));
}

void check_scalar(const Argument& argument, const at::Tensor& tensor, at::ScalarType dtype) {
  if (!tensor.defined()) fail(argument, "be a tensor", "an undefined tensor");
  if (tensor.layout() != at::kStrided || tensor.numel() != 1 || tensor.scalar_type() != dtype) {
    fail(argument, c10::str("hold one element of dtype ", dtype),
         c10::str(tensor.numel(), " of dtype ", tensor.scalar_type()));
  }
  check_not_negated(argument, tensor);
  if (!tensor.is_cpu() && !tensor.is_cuda()) {
    fail(argument, "be on a CPU or CUDA device", c10::str(tensor.device()));
  }
  check_storage(argument, tensor);
  if (tensor.const_data_ptr() == nullptr) {
    fail(argument, "have its own memory", "a null data pointer");
  }
}

void check_writable(const Argument& argument, const at::Tensor& tensor) {
  if (!tensor.defined() || !c10::GradMode::is_enabled()) return;
  if (tensor.requires_grad() && tensor.is_leaf()) {
    fail(argument, "be writable",
         "a leaf Variable that requires grad, used in an in-place operation",
         "Call the op under torch.no_grad().");
  }
}

void check_backend(const char* op, const c10::Device& device) {
#if defined(TORCHFUSE_WITH_CUDA)
  (void)op;
  (void)device;
#else
  TORCH_CHECK(!device.is_cuda(), op, ": torchfuse was built without CUDA and cannot run on ",
              device,
              ". Rebuild it with TORCHFUSE_WITH_CUDA=ON and an nvcc whose CUDA major version is "
              "torch's.");
#endif
}

}  // namespace torchfuse::ops
