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

/// Registers the kernels of an op fused_<algorithm>_.
void register_step(torch::Library& library, const char* name);

}  // namespace torchfuse::ops

/// Makes an optimizer known to FusedStep and as an op. Stands in namespace torchfuse.
#define TORCHFUSE_REGISTER_FUSED_OPTIMIZER(algorithm, Functor)                               \
  static_assert(std::string_view(kernels::Functor::kName) == #algorithm);                    \
  static const bool k##Functor##IsRegistered = ops::register_algorithm(                      \
      #algorithm, [] { return std::make_unique<ops::FusedAlgorithm<kernels::Functor>>(); }); \
  TORCH_LIBRARY_FRAGMENT(torchfuse, m) { ops::register_step(m, "fused_" #algorithm "_"); }   \
  static_assert(true)
