// SPDX-License-Identifier: BSD-3-Clause
// K1: computes sums of squares and the non-finite flag in one read of all gradients, in two tiers.
// The last block may also run the step's prologue.
#include "kernels/multi_tensor_l2_norm.h"

#include "kernels/common/atomic.h"
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/device_span.cuh"
#include "kernels/cuda/launch_table.cuh"
#include "kernels/cuda/prologue.cuh"
#include "kernels/cuda/thread_sums.cuh"
#include "kernels/cuda/vec.cuh"

namespace torchfuse::kernels {

namespace cuda {
namespace {

struct NormRow {
  const void* grad;
  std::int64_t numel;
  std::int64_t first_partial;  ///< the partial of the tensor's first chunk
};

/// A launch's arguments for Note [Bundles of partials].
struct NormPlaces {
  NormPartial* partials;
  std::int64_t num_partials;  ///< the entire list's number of partials
  NormBundles bundles;
};

static_assert(norm_chunk_on_cuda(0) >= kWarpElements, "a small gradient is one chunk");

/// A kernel's arguments. See Note [Short lists].
template <std::size_t kBytes>
struct NormLaunch {
  /// Maximum number of non-adjacent step counts. Additional counts need a separate launch.
  static constexpr int kSteps = kBytes == kMaxArgumentBytes ? 256 : 108;
  static constexpr int kRows = table_capacity(
      sizeof(NormRow), sizeof(NormPlaces) + sizeof(PrologueInputs) + sizeof(StepTable<kSteps>),
      kBytes);
  using Table = LaunchTable<NormRow, kRows>;
  union {
    Table table;
    DeviceSpan<sizeof(Table)> span;
  };
  bool is_span;  ///< whether `span` is used: see Note [Device tables]
  NormPlaces places;
  PrologueInputs prologue;  ///< no prologue if scalars are null
  StepTable<kSteps> steps;

  std::uint32_t blocks() const { return is_span ? span.blocks : table.blocks(); }
};

template <std::size_t kBytes>
__device__ __forceinline__ const void* grad_of(const NormLaunch<kBytes>& launch, int row) {
  return launch.is_span ? launch.span.grads[row] : launch.table.rows[row].grad;
}

template <std::size_t kBytes>
__device__ __forceinline__ std::int64_t first_partial_of(const NormLaunch<kBytes>& launch,
                                                         int row) {
  return launch.is_span ? launch.span.row(row).first_chunk : launch.table.rows[row].first_partial;
}

/// Sums the squares in the calling thread's share. Which thread adds which element, and in which
/// order, depends only on the share's `count`, not on the address: misaligned operands are read in
/// narrower accesses.
template <class S>
__device__ __forceinline__ auto sum_squares(const unsigned char* grad, const RowShare& share) {
  using T = decltype(widen(S{}));
  constexpr std::uint32_t kVec = kVectorBytes / sizeof(S);
  constexpr int kLoads = 4;  ///< vectors in flight per thread
  const std::uint32_t width = legal_width(reinterpret_cast<std::uintptr_t>(grad));
  const std::uint32_t vectors = share.count / kVec;
  ThreadSums<T> sums;
#pragma unroll 1
  for (std::uint32_t base = share.rank; base < vectors; base += kLoads * share.size) {
    RawVec<S, kVec> raw[kLoads] = {};
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const std::uint32_t i = base + k * share.size;
      // A vector past the end stays zero and adds nothing.
      if (i < vectors) load_vec<Keep::kNormal>(raw[k], grad + i * kVectorBytes, width);
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
#pragma unroll
      for (int pair = 0; pair < static_cast<int>(kVec / 2); ++pair) {
        T values[2];
        get_pair(raw[k], pair, values);
        sums.add(values[0], 2 * pair % sums.kChains);
        sums.add(values[1], (2 * pair + 1) % sums.kChains);
      }
    }
  }
  const std::uint32_t tail = vectors * kVec + share.rank;
  if (tail < share.count) sums.add(load_element<S>(grad, tail), 0);
  return sums;
}

/// Stores a team's partial. If the partial's bundle is then complete, adds the bundle: see Note
/// [Bundles of partials] and Note [Hand-over between blocks]. All lanes of the team's first warp
/// must call this function. Lane 0 passes the partial, and gets whether all bundles have now been
/// added.
__device__ __forceinline__ bool put_partial(const NormPlaces& places, std::int64_t place,
                                            const NormPartial& partial) {
  const std::uint32_t lane = threadIdx.x % kWarpThreads;
  const std::int64_t bundle = place / kNormBundle;
  const std::int64_t first = bundle * kNormBundle;
  const std::int64_t rest = places.num_partials - first;
  const std::uint32_t size = static_cast<std::uint32_t>(rest < kNormBundle ? rest : kNormBundle);
  std::uint32_t* const arrivals = places.bundles.arrivals;
  std::uint32_t before = 0;
  if (lane == 0) {
    places.partials[place] = partial;
    before = fetch_add_acq_rel(arrivals + 1 + bundle, 1);
  }
  if (__shfl_sync(0xffffffffu, before, 0) != size - 1) return false;
  __syncwarp();
  NormPartial sum{0.0, 0.0, 0};
  if (lane < size) sum = places.partials[first + lane];
  sum = warp_sum(sum);
  if (lane != 0) return false;
  places.bundles.sums[bundle] = sum;
  arrivals[1 + bundle] = 0;
  const std::int64_t others = (places.num_partials - 1) / kNormBundle;
  if (fetch_add_acq_rel(arrivals, 1) != static_cast<std::uint32_t>(others)) return false;
  *arrivals = 0;
  return true;
}

// A block handles one chunk of up to kNormChunk elements, a warp one small gradient. Each chunk
// gives one partial. sizeof(S) bytes per element, in 16-byte loads if the address allows them. Any
// alignment.
template <class S, std::size_t kBytes>
__global__ void __launch_bounds__(kThreads)
    multi_tensor_l2_norm_kernel(const NormLaunch<kBytes> __grid_constant__ launch) {
  const RowShare share = row_share(EitherRows(launch));
  NormPartial partial{0.0, 0.0, 0};
  std::int64_t place = 0;
  if (share.row >= 0) {
    place = first_partial_of(launch, share.row) + share.chunk_index;
    const unsigned char* grad = static_cast<const unsigned char*>(grad_of(launch, share.row)) +
                                share.begin * static_cast<std::int64_t>(sizeof(S));
    partial = sum_squares<S>(grad, share).partial();
  }
  partial = share.size == kThreads ? block_sum(partial) : warp_sum(partial);
  bool last = false;
  if (share.row >= 0 && share.rank < kWarpThreads) {
    last = put_partial(launch.places, place, partial);
  }
  if (launch.prologue.scalars == nullptr || __syncthreads_or(last) == 0) return;
  run_prologue(launch.prologue, launch.steps);
}

template <std::size_t kBytes>
Status launch_norm(const NormLaunch<kBytes>& arguments, DType dtype, Stream stream) {
  return dispatch_dtype(dtype, "gradient dtype of multi_tensor_l2_norm", [&]<class S>(S) {
    return launch(multi_tensor_l2_norm_kernel<S, kBytes>, arguments, arguments.blocks(), kThreads,
                  stream, "launch of multi_tensor_l2_norm_kernel");
  });
}

/// Enqueues a list's last launch. Its last block runs the prologue, when everything earlier on the
/// stream is finished.
template <std::size_t kBytes>
Status launch_with_prologue(NormLaunch<kBytes>& arguments, const PrologueArgs& prologue,
                            DType dtype, Stream stream) {
  arguments.prologue = {prologue.params, prologue.partials, prologue.num_partials,
                        prologue.scalars};
  const std::int64_t taken =
      arguments.steps.take(prologue.steps, prologue.num_steps, kMostStepsOfABlock);
  const Status status = launch_norm(arguments, dtype, stream);
  if (!status.ok() || taken == prologue.num_steps) return status;
  return grow_steps(prologue.scalars, prologue.steps + taken, prologue.num_steps - taken, stream);
}

/// Enqueues all but the last launch of a list. Leaves the last launch in `arguments`, and sets
/// `any` if there is one.
template <std::size_t kBytes>
Status fill_norms(const L2NormArgs& args, Stream stream, NormLaunch<kBytes>& arguments, bool* any) {
  const TensorTable& tensors = args.tensors;
  const std::uint32_t chunk = static_cast<std::uint32_t>(args.chunk);
  *any = false;
  // A launch is enqueued when the next row follows, so that the last launch is known to be the
  // last.
  if (tensors.device != nullptr) {
    arguments.is_span = true;
    for (std::int32_t begin = 0; begin < tensors.device->count; begin += arguments.span.count) {
      const Status status = *any ? launch_norm(arguments, tensors.grad, stream) : Status{};
      if (!status.ok()) return status;
      arguments.span.fill(*tensors.device, begin, /*from_the_end=*/false,
                          [&](std::int64_t i) { return tensors.rows[i].grad; });
      *any = true;
    }
    return Status{};
  }
  arguments.table.reset(chunk);
  return for_each_row(tensors, [&](std::int64_t i) {
    Status status;
    if (arguments.table.full()) {
      status = launch_norm(arguments, tensors.grad, stream);
      arguments.table.reset(chunk);
    }
    const TensorRow& row = tensors.rows[i];
    arguments.table.append(NormRow{row.grad, row.numel, args.chunk_offsets[i]});
    *any = true;
    return status;
  });
}

template <std::size_t kBytes>
Status enqueue_sums(const L2NormArgs& args, const NormBundles& bundles,
                    const PrologueArgs* prologue, bool* prologue_done, Stream stream) {
  static_assert(sizeof(NormLaunch<kBytes>) <= kBytes);
  NormLaunch<kBytes> arguments{};
  arguments.places = {args.partials, args.chunk_offsets[args.tensors.count], bundles};
  bool any = false;
  const Status status = fill_norms(args, stream, arguments, &any);
  if (!status.ok() || !any) return status;
  if (prologue == nullptr) return launch_norm(arguments, args.tensors.grad, stream);
  *prologue_done = true;
  return launch_with_prologue(arguments, *prologue, args.tensors.grad, stream);
}

}  // namespace
}  // namespace cuda

Status multi_tensor_l2_norm_cuda(const L2NormArgs& args, const NormBundles& bundles,
                                 const PrologueArgs* prologue, bool* prologue_done, Stream stream) {
  using namespace cuda;
  using Short = NormLaunch<kShortArgumentBytes>;
  *prologue_done = false;
  const bool is_short = args.tensors.device == nullptr && args.tensors.count <= Short::kRows &&
                        (prologue == nullptr || prologue->num_steps <= Short::kSteps);
  const auto enqueue =
      is_short ? enqueue_sums<kShortArgumentBytes> : enqueue_sums<kMaxArgumentBytes>;
  return enqueue(args, bundles, prologue, prologue_done, stream);
}

}  // namespace torchfuse::kernels
