// SPDX-License-Identifier: BSD-3-Clause
// The prologue as a separate kernel, for steps in which the norm kernel's last block cannot run the
// prologue.
#include "kernels/prologue.h"

#include "kernels/cuda/launch_table.cuh"
#include "kernels/cuda/prologue.cuh"

namespace torchfuse::kernels {

namespace cuda {
namespace {

constexpr int kStepPointers = 4000;

struct PrologueLaunch {
  PrologueInputs inputs;
  StepTable<kStepPointers> steps;
};

struct GrowStepsLaunch {
  const StepScalars* scalars;
  StepTable<kStepPointers> steps;
};

struct ReduceLaunch {
  const NormPartial* partials;
  std::int64_t count;
  NormPartial* sum;
};

// One block sums the partials (24 bytes each), makes the step's decisions and increments each step
// count (8 bytes each). No alignment beyond the types' own.
__global__ void __launch_bounds__(kThreads)
    prologue_kernel(const PrologueLaunch __grid_constant__ launch) {
  run_prologue(launch.inputs, launch.steps);
}

// One thread per step count, 8 bytes each.
__global__ void __launch_bounds__(kThreads)
    grow_steps_kernel(const GrowStepsLaunch __grid_constant__ launch) {
  if (launch.scalars->skip != 0.0f) return;
  const std::int32_t i = static_cast<std::int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (i < launch.steps.count) *launch.steps.at(i) += 1.0f;
}

// One block sums the partials (24 bytes each).
__global__ void __launch_bounds__(kThreads)
    reduce_partials_kernel(const ReduceLaunch __grid_constant__ launch) {
  const NormPartial sum = sum_partials(launch.partials, launch.count);
  if (threadIdx.x == 0) *launch.sum = sum;
}

}  // namespace

Status grow_steps(const StepScalars* scalars, float* const* steps, std::int64_t count,
                  Stream stream) {
  GrowStepsLaunch arguments{};
  arguments.scalars = scalars;
  constexpr std::int64_t kMostInARow = std::int64_t{1} << 30;
  while (count > 0) {
    const std::int64_t taken = arguments.steps.take(steps, count, kMostInARow);
    steps += taken;
    count -= taken;
    const std::uint32_t blocks = (static_cast<std::uint32_t>(taken) + kThreads - 1) / kThreads;
    const Status status = launch(grow_steps_kernel, arguments, blocks, kThreads, stream,
                                 "launch of grow_steps_kernel");
    if (!status.ok()) return status;
  }
  return Status{};
}

}  // namespace cuda

Status prologue_cuda(const PrologueArgs& args, Stream stream) {
  cuda::PrologueLaunch arguments{};
  arguments.inputs = {args.params, args.partials, args.num_partials, args.scalars};
  const std::int64_t taken =
      arguments.steps.take(args.steps, args.num_steps, cuda::kMostStepsOfABlock);
  const Status status = cuda::launch(cuda::prologue_kernel, arguments, 1, cuda::kThreads, stream,
                                     "launch of prologue_kernel");
  if (!status.ok() || taken == args.num_steps) return status;
  return cuda::grow_steps(args.scalars, args.steps + taken, args.num_steps - taken, stream);
}

Status reduce_partials_cuda(const NormPartial* partials, std::int64_t count, NormPartial* sum,
                            Stream stream) {
  return cuda::launch(cuda::reduce_partials_kernel, cuda::ReduceLaunch{partials, count, sum}, 1,
                      cuda::kThreads, stream, "launch of reduce_partials_kernel");
}

}  // namespace torchfuse::kernels
