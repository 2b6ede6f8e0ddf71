// SPDX-License-Identifier: BSD-3-Clause
// The ops fused_<algorithm>_: one fused step whose tensors come as lists. An op is its schema: the
// names of the arguments say which list holds which state, and which number is which
// hyper-parameter.
#pragma once

#include <torch/library.h>

#include <memory>
#include <string_view>

#include "ops/fused_step/algorithm.h"
#include "ops/registration.h"

namespace torchfuse::ops {

/// Boxed kernel of every op fused_<algorithm>_, for one StepEngine per call.
void functional_step(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack);

/// Its Meta kernel: writes nothing, and refuses tensors of another device, which would be left out.
void trace_step(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack);

}  // namespace torchfuse::ops

#define TORCHFUSE_REGISTER_STEP_KERNEL(Key, algorithm, kernel)                                  \
  TORCH_LIBRARY_IMPL(torchfuse, Key, m) {                                                       \
    m.impl("fused_" #algorithm "_", torch::CppFunction::makeFromBoxedFunction<&ops::kernel>()); \
  }

/// Makes an optimizer known to FusedStep and as an op, on every backend: empty lists carry no
/// device, and other layouts and devices get our error. Stands in namespace torchfuse.
#define TORCHFUSE_REGISTER_FUSED_OPTIMIZER(algorithm, Functor)                               \
  static_assert(std::string_view(kernels::Functor::kName) == #algorithm);                    \
  static const bool k##Functor##IsRegistered = ops::register_algorithm(                      \
      #algorithm, [] { return std::make_unique<ops::FusedAlgorithm<kernels::Functor>>(); }); \
  TORCHFUSE_REGISTER_STEP_KERNEL(CPU, algorithm, functional_step)                            \
  TORCHFUSE_REGISTER_STEP_KERNEL(CUDA, algorithm, functional_step)                           \
  TORCHFUSE_REGISTER_STEP_KERNEL(CompositeExplicitAutograd, algorithm, functional_step)      \
  TORCHFUSE_REGISTER_STEP_KERNEL(Meta, algorithm, trace_step)                                \
  static_assert(true)
