// SPDX-License-Identifier: BSD-3-Clause
#include "ops/check.h"

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <sstream>

namespace torchfuse::ops {

namespace {

template <class T>
std::string text(const T& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

}  // namespace

void fail(const Argument& argument, const std::string& expected, const std::string& got,
          const char* remedy) {
  std::ostringstream message;
  message << argument.op << ": expected " << argument.name;
  if (argument.index >= 0) message << '[' << argument.index << ']';
  message << " to " << expected << ", got " << got << '.';
  if (*remedy != '\0') message << ' ' << remedy;
  TORCH_CHECK(false, message.str());
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
           text(tensor.scalar_type()),
           tensor.is_complex() ? "View complex tensors as real with torch.view_as_real." : "");
  }
}

void check_tensor(const Argument& argument, const at::Tensor& tensor) {
  if (!tensor.defined()) fail(argument, "be a tensor", "an undefined tensor");
  if (tensor.layout() != at::kStrided) {
    fail(argument, "be dense", "a tensor of layout " + text(tensor.layout()),
         "Sparse gradients are not supported; use torch.optim.SparseAdam for those parameters, or "
         "layers without sparse=True.");
  }
  dtype_of(argument, tensor);
  if (!tensor.is_cpu() && !tensor.is_cuda()) {
    fail(argument, "be on a CPU or CUDA device", text(tensor.device()));
  }
  if (tensor.numel() != 0 && tensor.const_data_ptr() == nullptr) {
    fail(argument, "have memory of its own", "a null data pointer",
         "Wrapper tensors (DTensor, FakeTensor) must be unwrapped first.");
  }
  check_backend(argument.op, tensor.device());
}

void check_dense(const Argument& argument, const at::Tensor& tensor) {
  check_tensor(argument, tensor);
  if (!tensor.is_non_overlapping_and_dense()) {
    fail(argument, "fill its memory without gaps or overlap",
         "sizes " + text(tensor.sizes()) + " with strides " + text(tensor.strides()),
         "Pass tensor.contiguous() or a parameter that owns its memory.");
  }
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  const auto sizes = a.sizes();
  if (!sizes.equals(b.sizes())) return false;
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] != 1 && a.strides()[d] != b.strides()[d]) return a.numel() == 0;
  }
  return true;
}

void check_same_sizes(const Argument& argument, const at::Tensor& tensor,
                      const at::Tensor& reference, const char* reference_name) {
  if (tensor.sizes().equals(reference.sizes())) return;
  fail(argument,
       std::string("have the sizes of ") + reference_name + ", " + text(reference.sizes()),
       text(tensor.sizes()));
}

void check_same_device(const Argument& argument, const at::Tensor& tensor,
                       const c10::Device& device, const char* reference_name) {
  if (tensor.device() == device) return;
  fail(argument, std::string("be on the device of ") + reference_name + ", " + text(device),
       text(tensor.device()),
       "Move the model before building the optimizer, or load the optimizer's state again.");
}

void check_same_length(const char* op, const char* name, std::size_t length, std::size_t expected,
                       const char* reference_name) {
  if (length == expected) return;
  fail(Argument{op, name},
       std::string("have as many tensors as ") + reference_name + ", " + text(expected),
       text(length));
}

void check_scalar(const Argument& argument, const at::Tensor& tensor, at::ScalarType dtype) {
  if (!tensor.defined()) fail(argument, "be a tensor", "an undefined tensor");
  if (tensor.layout() != at::kStrided || tensor.numel() != 1 || tensor.scalar_type() != dtype) {
    fail(argument, "hold one element of dtype " + text(dtype),
         text(tensor.numel()) + " of dtype " + text(tensor.scalar_type()));
  }
  if (!tensor.is_cpu() && !tensor.is_cuda()) {
    fail(argument, "be on a CPU or CUDA device", text(tensor.device()));
  }
  if (tensor.const_data_ptr() == nullptr) {
    fail(argument, "have memory of its own", "a null data pointer");
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
