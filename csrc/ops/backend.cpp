// SPDX-License-Identifier: BSD-3-Clause
#include "ops/backend.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <string>

#include <torchfuse/cpu_isa.h>

#if defined(TORCHFUSE_WITH_CUDA)
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "kernels/device.h"
#endif

#if !defined(_OPENMP)
#error "compile csrc/ops with OpenMP: at::parallel_for is silently serial without it"
#endif

namespace torchfuse::ops {

namespace {

std::atomic<kernels::CpuIsa>& isa_in_force() {
  static std::atomic<kernels::CpuIsa> isa{kernels::detect_cpu_isa()};
  return isa;
}

}  // namespace

kernels::CpuIsa current_cpu_isa() { return isa_in_force().load(std::memory_order_relaxed); }

kernels::Stream current_stream(const c10::Device& device) {
#if defined(TORCHFUSE_WITH_CUDA)
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
#else
  TORCH_INTERNAL_ASSERT(false, "no streams without CUDA, asked for ", device);
#endif
}

#if defined(TORCHFUSE_WITH_CUDA)
int multiprocessors_of(const char* op, const c10::Device& device) {
  int count = 1;
  check_status(op, kernels::multiprocessor_count(device.index(), &count));
  return count;
}
#endif

std::optional<std::uint64_t> current_capture([[maybe_unused]] const c10::Device& device) {
#if defined(TORCHFUSE_WITH_CUDA)
  if (!device.is_cuda()) return std::nullopt;
  const c10::OptionalDeviceGuard guard(device);
  std::uint64_t id = 0;
  check_status("capture", kernels::capture_id(c10::cuda::getCurrentCUDAStream(), &id));
  if (id != 0) return id;
#endif
  return std::nullopt;
}

}  // namespace torchfuse::ops

namespace torchfuse {

at::Tensor to_device(const at::Tensor& tensor, const at::Device& device) {
  return tensor.to(device, /*non_blocking=*/device.is_cuda());
}

bool is_capturing(const at::Device& device) { return ops::current_capture(device).has_value(); }

std::string cpu_isa() { return kernels::name_of(ops::current_cpu_isa()); }

void set_cpu_isa(const std::string& name) {
  using kernels::CpuIsa;
  const CpuIsa best = kernels::detect_cpu_isa();
  std::string names;
  for (const CpuIsa isa : kernels::kCpuLevels) {
    names += (names.empty() ? "" : ", ") + std::string(kernels::name_of(isa));
    if (name != kernels::name_of(isa)) continue;
    TORCH_CHECK(isa <= best, "set_cpu_isa: expected name to be a level of this processor, got ",
                name, ". The best here is ", kernels::name_of(best), ".");
    ops::isa_in_force().store(isa, std::memory_order_relaxed);
    return;
  }
  TORCH_CHECK(false, "set_cpu_isa: expected name to be one of ", names, "; got ", name, ".");
}

}  // namespace torchfuse
