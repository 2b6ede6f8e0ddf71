// SPDX-License-Identifier: BSD-3-Clause
// The ops fused_<algorithm>_, each of which runs a fused step over lists of tensors. The op's
// schema defines the step: argument names tell which list contains which state, and which number is
// which hyper-parameter.
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

/// Registers an optimizer with FusedStep and as an op. Use the macro in namespace torchfuse.
#define TORCHFUSE_REGISTER_FUSED_OPTIMIZER(algorithm, Functor)                               \
  static_assert(std::string_view(kernels::Functor::kName) == #algorithm);                    \
  static const bool k##Functor##IsRegistered = ops::register_algorithm(                      \
      #algorithm, [] { return std::make_unique<ops::FusedAlgorithm<kernels::Functor>>(); }); \
  TORCH_LIBRARY_FRAGMENT(torchfuse, m) { ops::register_step(m, "fused_" #algorithm "_"); }   \
  static_assert(true)
