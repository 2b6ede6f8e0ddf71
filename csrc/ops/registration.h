// SPDX-License-Identifier: BSD-3-Clause
// How an op that mutates its arguments and returns nothing is registered and called.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <type_traits>
#include <utility>

namespace torchfuse::ops {

/// Boxed Meta kernel of such an op: drops the arguments. Its schema alone says all that tracing
/// needs.
inline void trace_only(const c10::OperatorHandle& op, c10::DispatchKeySet,
                       torch::jit::Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
}

/// Calls the op through the dispatcher. `Function` gives its signature.
template <auto Function, class... Args>
void call_op(const char* name, Args&&... args) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(name, "")
                             .typed<std::remove_pointer_t<decltype(Function)>>();
  op.call(std::forward<Args>(args)...);
}

}  // namespace torchfuse::ops
