// SPDX-License-Identifier: BSD-3-Clause
// In-place unscale with check: reads and writes every element once.
#include "kernels/multi_tensor_unscale.h"

#include "kernels/common/atomic.h"
#include "kernels/common/step_scalars.h"
#include "kernels/cuda/launch_table.cuh"
#include "kernels/cuda/vec.cuh"

namespace torchfuse::kernels {

namespace cuda {
namespace {

struct UnscaleRow {
  void* grad;
  std::int64_t numel;
};

/// A kernel's arguments. See Note [Short lists].
template <std::size_t kBytes>
struct UnscaleLaunch {
  static constexpr int kRows = table_capacity(sizeof(UnscaleRow), 2 * sizeof(void*), kBytes);
  LaunchTable<UnscaleRow, kRows> table;
  const float* inv_scale;
  float* found_inf;
};

template <class S>
using ComputeOf = decltype(widen(S{}));

/// Returns whether x is finite, because x - x is only 0 for a finite x.
template <class T>
__device__ __forceinline__ bool is_finite(T x) {
  return x - x == T(0);
}

// A block handles one chunk of a gradient, a warp one small gradient. 2 * sizeof(S) bytes per
// element in 16-byte accesses. The elements before the first 16-byte boundary and after the last
// vector, at most 15 in total, are handled one by one.
template <class S, std::size_t kBytes>
__global__ void __launch_bounds__(kThreads)
    multi_tensor_unscale_kernel(const UnscaleLaunch<kBytes> __grid_constant__ launch) {
  using T = ComputeOf<S>;
  constexpr std::uint32_t kVec = kVectorBytes / sizeof(S);
  const RowShare share = row_share(launch.table);
  if (share.row < 0) return;
  const auto coef = grad_coef_of<T>(widened(*launch.inv_scale));
  unsigned char* const grad = static_cast<unsigned char*>(launch.table.rows[share.row].grad) +
                              share.begin * static_cast<std::int64_t>(sizeof(S));
  const std::uint32_t past =
      static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(grad)) % kVectorBytes / sizeof(S);
  const std::uint32_t to_boundary = (kVec - past) % kVec;
  const std::uint32_t head = to_boundary < share.count ? to_boundary : share.count;
  const std::uint32_t vectors = (share.count - head) / kVec;
  bool finite = true;

  const auto address_of = [&](std::uint32_t vector) {
    return grad + (head + vector * kVec) * sizeof(S);
  };
  const auto unscale = [&](RawVec<S, kVec>& raw) {
#pragma unroll
    for (int pair = 0; pair < static_cast<int>(kVec / 2); ++pair) {
      T values[2];
      get_pair(raw, pair, values);
      finite = finite && is_finite(values[0]) && is_finite(values[1]);
      const T scaled[2] = {coef.scaled(values[0]), coef.scaled(values[1])};
      set_pair(raw, pair, scaled);
    }
  };
  // Two loads before the first store: to the compiler, a store may change what a later load reads.
  std::uint32_t i = share.rank;
  for (; i + share.size < vectors; i += 2 * share.size) {
    RawVec<S, kVec> raws[2];
    load_words<kVectorBytes, Keep::kNormal>(address_of(i), raws[0].words);
    load_words<kVectorBytes, Keep::kNormal>(address_of(i + share.size), raws[1].words);
    unscale(raws[0]);
    unscale(raws[1]);
    store_words<kVectorBytes, Keep::kNormal>(address_of(i), raws[0].words);
    store_words<kVectorBytes, Keep::kNormal>(address_of(i + share.size), raws[1].words);
  }
  if (i < vectors) {
    RawVec<S, kVec> raw;
    load_words<kVectorBytes, Keep::kNormal>(address_of(i), raw.words);
    unscale(raw);
    store_words<kVectorBytes, Keep::kNormal>(address_of(i), raw.words);
  }

  const std::uint32_t tail = head + vectors * kVec;
  const std::uint32_t singles = head + (share.count - tail);
  if (share.rank < singles) {
    const std::uint32_t single = share.rank < head ? share.rank : tail + (share.rank - head);
    const T value = load_element<S>(grad, single);
    finite = finite && is_finite(value);
    store_element<S>(grad, single, coef.scaled(value));
  }
  if (!finite) raise_flag(launch.found_inf);
}

template <std::size_t kBytes>
Status launch_unscale(const UnscaleLaunch<kBytes>& arguments, DType dtype, Stream stream) {
  return dispatch_dtype(dtype, "gradient dtype of multi_tensor_unscale", [&]<class S>(S) {
    return launch(multi_tensor_unscale_kernel<S, kBytes>, arguments, arguments.table.blocks(),
                  kThreads, stream, "launch of multi_tensor_unscale_kernel");
  });
}

template <std::size_t kBytes>
Status enqueue_unscale(const UnscaleArgs& args, Stream stream) {
  const std::uint32_t vec = kVectorBytes / static_cast<std::uint32_t>(size_of(args.tensors.grad));
  const std::uint32_t chunk = choose_chunk(args.tensors.total(), kThreads * vec);
  static_assert(sizeof(UnscaleLaunch<kBytes>) <= kBytes);
  UnscaleLaunch<kBytes> arguments{};
  arguments.inv_scale = args.inv_scale;
  arguments.found_inf = args.found_inf;
  arguments.table.reset(chunk);
  const Status status = for_each_row(args.tensors, [&](std::int64_t i) {
    const TensorRow& row = args.tensors.rows[i];
    arguments.table.append(UnscaleRow{row.grad, row.numel});
    if (!arguments.table.full()) return Status{};
    const Status launched = launch_unscale(arguments, args.tensors.grad, stream);
    arguments.table.reset(chunk);
    return launched;
  });
  if (!status.ok() || arguments.table.count == 0) return status;
  return launch_unscale(arguments, args.tensors.grad, stream);
}

}  // namespace
}  // namespace cuda

Status multi_tensor_unscale_cuda(const UnscaleArgs& args, Stream stream) {
  using namespace cuda;
  const bool is_short = args.tensors.count <= UnscaleLaunch<kShortArgumentBytes>::kRows;
  return is_short ? enqueue_unscale<kShortArgumentBytes>(args, stream)
                  : enqueue_unscale<kMaxArgumentBytes>(args, stream);
}

}  // namespace torchfuse::kernels
