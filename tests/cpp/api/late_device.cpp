// SPDX-License-Identifier: BSD-3-Clause
#include "late_device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <optional>

namespace torchfuse::testing {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

/// The host's memory by another name.
struct LateAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    c10::DataPtr memory = c10::GetCPUAllocator()->allocate(bytes);
    memory.unsafe_set_device(late_device());
    return memory;
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

c10::Allocator* allocator() {
  static LateAllocator instance;
  return &instance;
}

/// The same elements as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU).requires_grad(false));
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> /*layout*/, std::optional<at::Device> /*device*/,
                 std::optional<bool> /*pin_memory*/, std::optional<at::MemoryFormat> format) {
  return at::Tensor(
      at::detail::empty_generic(size, allocator(), kKeys, c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                         std::optional<at::Device> /*device*/, std::optional<bool> /*pin_memory*/) {
  return at::Tensor(at::detail::empty_strided_generic(size, stride, allocator(), kKeys,
                                                      c10::dtype_or_default(dtype)));
}

std::int64_t copied_from_host = 0;

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  const at::NoGradGuard no_grad;
  if (self.is_cpu()) ++copied_from_host;
  if (non_blocking && dst.is_cpu()) {
    dst.zero_();
  } else {
    on_host(dst).copy_(on_host(self));
  }
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  at::native::resize_output(dst, self.sizes());
  return copy_from(self, dst, /*non_blocking=*/false);
}

at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  on_host(self).fill_(value);
  return self;
}

at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }

/// Everything else; results are copied to the device.
void compute_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("fill_.Scalar", fill);
  m.impl("zero_", zero);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}

}  // namespace

std::int64_t copies_from_host() { return copied_from_host; }

C10_REGISTER_GUARD_IMPL(PrivateUse1, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::PrivateUse1>);

}  // namespace torchfuse::testing
