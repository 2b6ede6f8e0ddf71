// SPDX-License-Identifier: BSD-3-Clause
#include "ops/batch_norm/batch_norm_backend.h"

#include <algorithm>

#include "ops/backend.h"
#include "ops/launch/arrivals.h"

#if defined(TORCHFUSE_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace torchfuse::ops {

namespace {

/// Runs body(isa, begin, end) over the items of a sum on torch's threads.
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

#if defined(TORCHFUSE_WITH_CUDA)

/// What a launch uses of the workspace, as the kernels' declarations say.
enum class Uses { kMultiprocessors, kArrivals, kArrivalsAndPartials };

/// Memory of one launch; later work on the stream may use it again. No more than the launch uses:
/// in a graph each replay clears the counters.
class CudaWorkspace {
 public:
  CudaWorkspace(const BatchNormSource& source, const kernels::BatchNormShape& shape, Uses uses)
      : stream_(current_stream(source.device())) {
    const cudaError_t error = cudaDeviceGetAttribute(
        &workspace_.multiprocessors, cudaDevAttrMultiProcessorCount, source.device().index());
    check_status("batch_norm", {static_cast<int>(error), "cudaDeviceGetAttribute"});
    if (uses == Uses::kMultiprocessors) return;
    arrivals_ =
        zeroed_arrivals(source.device(), stream_, kernels::batch_norm_workspace_arrivals(shape));
    workspace_.arrivals = static_cast<std::uint32_t*>(arrivals_.mutable_data_ptr());
    if (uses == Uses::kArrivals) return;
    partials_ = source.empty_doubles(
        kernels::batch_norm_workspace_partials(shape, workspace_.multiprocessors));
    workspace_.partials = partials_.mutable_data_ptr<double>();
  }

  const kernels::BatchNormWorkspace& workspace() const { return workspace_; }
  kernels::Stream stream() const { return stream_; }

 private:
  kernels::Stream stream_;
  kernels::BatchNormWorkspace workspace_;
  at::Tensor partials_;
  at::Tensor arrivals_;
};

#endif

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
#if defined(TORCHFUSE_WITH_CUDA)
  const CudaWorkspace cuda(source, args.shape, Uses::kArrivalsAndPartials);
  check_status(op, kernels::batch_norm_stats_cuda(args, cuda.workspace(), cuda.stream()));
#else
  check_backend(op, source.device());
#endif
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
#if defined(TORCHFUSE_WITH_CUDA)
  const CudaWorkspace cuda(source, args.shape, Uses::kArrivals);
  check_status(op, kernels::batch_norm_elemt_cuda(args, finish, cuda.workspace(), cuda.stream()));
#else
  check_backend(op, source.device());
#endif
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
#if defined(TORCHFUSE_WITH_CUDA)
  const CudaWorkspace cuda(source, args.shape, Uses::kArrivalsAndPartials);
  check_status(op, kernels::batch_norm_backward_reduce_cuda(args, cuda.workspace(), cuda.stream()));
#else
  check_backend(op, source.device());
#endif
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
#if defined(TORCHFUSE_WITH_CUDA)
  const CudaWorkspace cuda(source, args.shape, Uses::kMultiprocessors);
  check_status(op, kernels::batch_norm_backward_elemt_cuda(args, cuda.workspace(), cuda.stream()));
#else
  check_backend(op, source.device());
#endif
}

}  // namespace torchfuse::ops
