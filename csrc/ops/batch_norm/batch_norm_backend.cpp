// SPDX-License-Identifier: BSD-3-Clause
#include "ops/batch_norm/batch_norm_backend.h"

#include <algorithm>

#include "ops/backend.h"
#include "ops/launch/arrivals.h"

namespace torchfuse::ops {

namespace {

/// Runs body(isa, begin, end) over a sum's items on torch's threads.
template <class Body>
void parallel_over_items(const kernels::BatchNormShape& shape, const Body& body) {
  const std::int64_t items = kernels::batch_norm_items(shape);
  if (items == 0) return;
  const std::int64_t item_elements = std::max<std::int64_t>(shape.numel() / items, 1);
  const std::int64_t grain = std::max<std::int64_t>(kGrainSize / item_elements, 1);
  const kernels::CpuIsa isa = current_cpu_isa();
  at::parallel_for(0, items, grain,
                   [&](std::int64_t begin, std::int64_t end) { body(isa, begin, end); });
}

/// Runs body(begin, end) over channels whose partial sums are added.
template <class Body>
void parallel_over_channels(const kernels::BatchNormShape& shape, const Body& body) {
  const std::int64_t rows = std::max<std::int64_t>(kernels::batch_norm_partial_rows(shape), 1);
  const std::int64_t grain = std::max<std::int64_t>(kGrainSize / rows, 1);
  at::parallel_for(0, shape.channels, grain, body);
}

/// The parts of the workspace that a launch uses, as the kernels' declarations say.
enum class Uses { kMultiprocessors, kArrivals, kArrivalsAndPartials };

/// Calls kLauncher(args..., workspace, stream). Later work on the stream may reuse the memory. The
/// workspace contains only what the launch uses, because every replay of a graph clears the
/// counters.
template <auto kLauncher, class... Args>
void launch([[maybe_unused]] const char* op, [[maybe_unused]] const BatchNormSource& source,
            [[maybe_unused]] Uses uses, [[maybe_unused]] const Args&... args) {
#if defined(TORCHFUSE_WITH_CUDA)
  const c10::Device device = source.device();
  const kernels::Stream stream = current_stream(device);
  kernels::BatchNormWorkspace workspace;
  at::Tensor arrivals;
  at::Tensor partials;
  workspace.multiprocessors = multiprocessors_of(op, device);
  if (uses != Uses::kMultiprocessors) {
    const std::int64_t count = kernels::batch_norm_workspace_arrivals(source.shape());
    arrivals = zeroed_arrivals(device, stream, count);
    workspace.arrivals = static_cast<std::uint32_t*>(arrivals.mutable_data_ptr());
  }
  if (uses == Uses::kArrivalsAndPartials) {
    partials = source.empty_doubles(
        kernels::batch_norm_workspace_partials(source.shape(), workspace.multiprocessors));
    workspace.partials = partials.mutable_data_ptr<double>();
  }
  check_status(op, kLauncher(args..., workspace, stream));
#endif
}

}  // namespace

void run_batch_norm_stats(const char* op, const BatchNormSource& source,
                          kernels::BatchNormStatsArgs& args) {
  if (source.device().is_cpu()) {
    const at::Tensor partials = source.empty_doubles(kernels::batch_norm_partial_rows(args.shape) *
                                                     args.shape.channels * kernels::kStatsPartial);
    args.partials = partials.mutable_data_ptr<double>();
    parallel_over_items(args.shape, [&](kernels::CpuIsa isa, std::int64_t begin, std::int64_t end) {
      kernels::batch_norm_stats_cpu(isa, args, begin, end);
    });
    return parallel_over_channels(args.shape, [&](std::int64_t begin, std::int64_t end) {
      kernels::batch_norm_pack_cpu(args, begin, end);
    });
  }
  launch<kernels::batch_norm_stats_cuda>(op, source, Uses::kArrivalsAndPartials, args);
}

void run_batch_norm_elemt(const char* op, const BatchNormSource& source,
                          const kernels::BatchNormFinishArgs& finish,
                          kernels::BatchNormElemtArgs& args) {
  if (source.device().is_cpu()) {
    const at::Tensor terms = source.empty_terms(kernels::kNormalizeTerms);
    args.terms = terms.mutable_data_ptr();
    kernels::batch_norm_finish_cpu(finish);
    kernels::batch_norm_elemt_terms_cpu(args);
    return parallel_over_elements(args.shape.numel(),
                                  [&](kernels::CpuIsa isa, std::int64_t begin, std::int64_t end) {
                                    kernels::batch_norm_elemt_cpu(isa, args, begin, end);
                                  });
  }
  launch<kernels::batch_norm_elemt_cuda>(op, source, Uses::kArrivals, args, finish);
}

void run_batch_norm_backward_reduce(const char* op, const BatchNormSource& source,
                                    kernels::BatchNormBackwardReduceArgs& args) {
  if (source.device().is_cpu()) {
    const at::Tensor terms = source.empty_terms(kernels::kNormalizeTerms);
    const at::Tensor partials = source.empty_doubles(kernels::batch_norm_partial_rows(args.shape) *
                                                     args.shape.channels * kernels::kGradPartial);
    args.terms = terms.mutable_data_ptr();
    args.partials = partials.mutable_data_ptr<double>();
    kernels::batch_norm_backward_reduce_terms_cpu(args);
    parallel_over_items(args.shape, [&](kernels::CpuIsa isa, std::int64_t begin, std::int64_t end) {
      kernels::batch_norm_backward_reduce_cpu(isa, args, begin, end);
    });
    return parallel_over_channels(args.shape, [&](std::int64_t begin, std::int64_t end) {
      kernels::batch_norm_backward_sum_cpu(args, begin, end);
    });
  }
  launch<kernels::batch_norm_backward_reduce_cuda>(op, source, Uses::kArrivalsAndPartials, args);
}

void run_batch_norm_backward_elemt(const char* op, const BatchNormSource& source,
                                   kernels::BatchNormBackwardElemtArgs& args) {
  if (source.device().is_cpu()) {
    const at::Tensor terms =
        source.empty_terms(kernels::kNormalizeTerms + kernels::kGradInputTerms);
    args.terms = terms.mutable_data_ptr();
    kernels::batch_norm_backward_elemt_terms_cpu(args);
    return parallel_over_elements(args.shape.numel(),
                                  [&](kernels::CpuIsa isa, std::int64_t begin, std::int64_t end) {
                                    kernels::batch_norm_backward_elemt_cpu(isa, args, begin, end);
                                  });
  }
  launch<kernels::batch_norm_backward_elemt_cuda>(op, source, Uses::kMultiprocessors, args);
}

}  // namespace torchfuse::ops
