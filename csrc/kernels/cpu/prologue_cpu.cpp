// SPDX-License-Identifier: BSD-3-Clause
#include "kernels/prologue.h"

#include "kernels/cpu/flush_denormals.h"

namespace torchfuse::kernels {

void reduce_partials_cpu(const NormPartial* partials, std::int64_t count, NormPartial* sum) {
  NormPartial total{};
  for (std::int64_t i = 0; i < count; ++i) total = total + partials[i];
  *sum = total;
}

namespace {

__attribute__((noinline)) void run_prologue(const PrologueArgs& args) {
  NormPartial sums{};
  reduce_partials_cpu(args.partials, args.num_partials, &sums);
  *args.scalars = step_scalars(args.params, sums);
  if (args.scalars->skip != 0.0f) return;
  for (std::int64_t i = 0; i < args.num_steps; ++i) *args.steps[i] += 1.0f;
}

}  // namespace

void prologue_cpu(const PrologueArgs& args) {
  const cpu::FlushDenormals flush;
  run_prologue(args);
}

}  // namespace torchfuse::kernels
