// SPDX-License-Identifier: BSD-3-Clause
// ATen's ops on CUDA tensors, computed by the CPU's kernels over the same memory: registration, and
// the few ops that need more than that.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/library.h>
#include <torch/version.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "../runtime/pretended_cuda.h"
#include "allocation.h"
#include "call.h"
#include "ops.h"

namespace pretended_cuda {
namespace {

/// Calls so far; printed at the end of the process with PRETENDED_CUDA_STATS=1.
struct Counts {
  std::atomic<std::uint64_t> at_once = 0, later = 0, waited = 0;
} counts;

cudaStream_t stream_of(c10::Device device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}

void redirect(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const std::size_t count = op.schema().arguments().size();
  torch::jit::Stack arguments = torch::jit::pop(*stack, count);
  if (spans_devices(op, arguments)) {
    for (c10::IValue& argument : arguments) stack->push_back(std::move(argument));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CompositeExplicitAutograd), stack);
    return;
  }
  const bool waits = synchronizes(op, arguments);
  Call call(op, std::move(arguments));
  const c10::cuda::CUDAGuard guard(call.device());
  using c10::cuda::SyncDebugMode;
  if (waits && c10::cuda::warning_state().get_sync_debug_mode() != SyncDebugMode::L_DISABLED) {
    c10::cuda::warn_or_error_on_sync();
  }
  const cudaStream_t stream = stream_of(call.device());
  std::optional<torch::jit::Stack> results;
  if (pretended_cuda_is_lazy() == 0 && pretended_cuda_is_idle(stream) != 0) {
    ++counts.at_once;
    results = call.run_at_once();
  } else {
    if (!waits) results = call.run_later();
    ++(results ? counts.later : counts.waited);
    if (!results) {
      C10_CUDA_CHECK(pretended_cuda_settle(stream));
      results = call.run_at_once();
    }
  }
  for (c10::IValue& result : *results) stack->push_back(std::move(result));
}

/// Host to device and back, and whole tensors between devices, are torch's own code: which streams
/// wait and what is pinned is decided there. What needs a kernel is redirected.
void copy(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const bool non_blocking = torch::jit::peek(*stack, 2, 3).toBool();
  const at::Tensor source = torch::jit::peek(*stack, 1, 3).toTensor();
  at::Tensor self = torch::jit::peek(*stack, 0, 3).toTensor();
  const bool plain = self.dtype() == source.dtype() && self.sizes() == source.sizes() &&
                     self.is_contiguous() && source.is_contiguous() &&
                     self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
  if (self.is_cuda() && source.is_cuda() && !plain && self.device() == source.device()) {
    redirect(op, keys, stack);
    return;
  }
  torch::jit::drop(*stack, 3);
  if (self.is_cuda() && source.is_cuda() && !plain) {
    at::Tensor converted = at::empty(self.sizes(), self.options().device(source.device()));
    converted.copy_(source);
    at::Tensor moved = at::empty(self.sizes(), self.options());
    at::native::copy_(moved, converted, non_blocking);
    self.copy_(moved);
  } else {
    at::native::copy_(self, source, non_blocking);
  }
  stack->push_back(std::move(self));
}

void lacks(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "pretended CUDA lacks ", op.schema().name(),
                              ": the CPU has no kernel of that name.");
}

void print_counts() {
  std::fprintf(stderr, "pretended CUDA: ATen ops: %llu at once, %llu queued, %llu after waiting\n",
               static_cast<unsigned long long>(counts.at_once),
               static_cast<unsigned long long>(counts.later),
               static_cast<unsigned long long>(counts.waited));
}

/// Libraries of NVIDIA's have no kernels here; the plain formulas consist of ops that are
/// redirected.
void choose_libraries() {
  at::globalContext().setUserEnabledCuDNN(false);
  at::globalContext().setSDPUseFlash(false);
  at::globalContext().setSDPUseMemEfficient(false);
  at::globalContext().setSDPUseCuDNN(false);
}

using Handles = std::vector<c10::RegistrationHandleRAII>;

void put(Handles& handles, const c10::OperatorName& name, c10::KernelFunction kernel) {
  handles.push_back(c10::Dispatcher::singleton().registerImpl(
      name, c10::DispatchKey::CUDA, std::move(kernel), std::nullopt, nullptr, "pretended CUDA"));
}

struct Quiet : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void redirect_all(Handles& handles) {
  Quiet quiet;  // torch warns of each kernel that is replaced
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  using c10::DispatchKey;
  using c10::KernelFunction;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (name.name.rfind("aten::", 0) != 0 || !op || keeps_its_own_code(*op)) continue;
    if (name.name == "aten::copy_") {
      put(handles, name, KernelFunction::makeFromBoxedFunction<&copy>());
    } else if (name.name == "aten::empty" && name.overload_name == "memory_format") {
      put(handles, name, KernelFunction::makeFromUnboxedRuntimeFunction(&empty));
    } else if (name.name == "aten::empty_strided" && name.overload_name.empty()) {
      put(handles, name, KernelFunction::makeFromUnboxedRuntimeFunction(&empty_strided));
    } else if (op->hasKernelForDispatchKey(DispatchKey::CUDA) || is_redirected_anyway(*op)) {
      const bool on_cpu = op->hasKernelForDispatchKey(DispatchKey::CPU) ||
                          op->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
      put(handles, name,
          on_cpu ? KernelFunction::makeFromBoxedFunction<&redirect>()
                 : KernelFunction::makeFromBoxedFunction<&lacks>());
    }
  }
}

}  // namespace
}  // namespace pretended_cuda

/// Called by the runtime while torch counts its devices, so it asks torch nothing about them.
/// Returns why the redirect cannot be used, or null.
extern "C" __attribute__((visibility("default"))) const char* pretended_cuda_redirect() {
  using namespace pretended_cuda;
  static std::string why;
  if (aoti_torch_abi_version() != TORCH_ABI_VERSION) {
    why = std::string("they were built for torch ") + TORCH_VERSION + ", build them anew";
    return why.c_str();
  }
  static auto* const handles = new Handles;
  redirect_all(*handles);
  choose_libraries();
  if (const char* stats = std::getenv("PRETENDED_CUDA_STATS"); stats && *stats == '1') {
    std::atexit(print_counts);
  }
  return nullptr;
}
