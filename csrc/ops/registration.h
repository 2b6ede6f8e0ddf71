// SPDX-License-Identifier: BSD-3-Clause
// Registers ops with the dispatcher, and calls ops through it.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <type_traits>
#include <utility>

namespace torchfuse::ops {

/// Boxed Meta kernel of an op that mutates its arguments and returns nothing. Drops the arguments,
/// because tracing needs only the schema.
inline void trace_only(const c10::OperatorHandle& op, c10::DispatchKeySet,
                       torch::jit::Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
}

/// Returns a kernel, boxed or unboxed, in the form that the dispatcher expects.
template <auto kKernel>
torch::CppFunction kernel_function() {
  if constexpr (std::is_same_v<decltype(kKernel), decltype(&trace_only)>) {
    return torch::CppFunction::makeFromBoxedFunction<kKernel>();
  } else {
    return torch::CppFunction(kKernel);
  }
}

/// Registers an op's kernel for every backend. Empty lists have no device, and unsupported layouts
/// and devices must get torchfuse's error message. The meta kernel sees only sizes and dtypes.
template <auto kKernel, auto kMetaKernel>
void register_op(torch::Library& library, const char* name) {
  using c10::DispatchKey;
  for (const auto key :
       {DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::CompositeExplicitAutograd}) {
    library.impl(name, torch::dispatch(key, kernel_function<kKernel>()));
  }
  library.impl(name, torch::dispatch(DispatchKey::Meta, kernel_function<kMetaKernel>()));
}

/// Calls the op through the dispatcher. `kFunction` provides the op's signature.
template <auto kFunction, class... Args>
decltype(auto) call_op(const char* name, Args&&... args) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(name, "")
                             .typed<std::remove_pointer_t<decltype(kFunction)>>();
  return op.call(std::forward<Args>(args)...);
}

}  // namespace torchfuse::ops
