// SPDX-License-Identifier: BSD-3-Clause
// Cross entropy of softmax. A team of threads handles a row at a time: a warp where the row fits
// its registers (8 teams in a block), else a block of 256. Bytes per logit: one read each way, and
// the gradient's write. Accesses are as wide as the row's address allows.
#include "kernels/softmax_cross_entropy.h"

#include "kernels/cuda/rows.cuh"

namespace torchfuse::kernels {

namespace cuda {

constexpr int kEntropyKept = 1;    ///< every logit is needed once
constexpr int kEntropyBlocks = 4;  ///< resident on a multiprocessor

/// The sums of exp(x - largest) and of x - largest over the logits that a thread has seen. One
/// pass: where a larger logit comes, the sums are made those of it.
template <class T, std::uint32_t kThreads>
struct OnlineSums {
  T largest;
  T seen = T(0);
  RowSums<T, 2, kThreads> sums;

  template <int kVec>
  __device__ __forceinline__ void add(const T (&x)[kVec], int count) {
    T top = largest;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (i < count) top = kernels::max(top, x[i]);
    }
    move_to(top);
    seen = seen + static_cast<T>(count);
    // Infinitely far below what other threads may have: nothing to add, and no difference to take.
    if (top == static_cast<T>(-__builtin_huge_val())) return;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (i >= count) continue;
      const T below = x[i] - top;
      sums.recent[0] = sums.recent[0] + exp_of_negative<T>(below);
      sums.recent[1] = sums.recent[1] + below;
    }
  }

  __device__ __forceinline__ void move_to(T top) {
    if (top == largest) return;
    const T change = largest - top;
    sums.scale(0, exp_of_negative<T>(change));
    // The change may be infinite.
    if (seen > T(0)) sums.recent[1] = fma(seen, change, sums.recent[1]);
    largest = top;
  }
};

/// The elements of a vector, converted.
template <class S, class T, int kVec>
__device__ __forceinline__ void widen_all(const RawVec<S, kVec>& raw, T (&values)[kVec]) {
#pragma unroll
  for (int pair = 0; pair < kVec / 2; ++pair) {
    T two[2];
    get_pair(raw, pair, two);
    values[2 * pair] = two[0];
    values[2 * pair + 1] = two[1];
  }
}

template <class S, std::uint32_t kThreads>
__global__ void __launch_bounds__(kRowThreads, kEntropyBlocks)
    softmax_cross_entropy_kernel(const CrossEntropyArgs __grid_constant__ launch) {
  using T = RowCompute<S>;
  constexpr int kVec = kRowVec<S>;
  const auto classes = static_cast<std::uint32_t>(launch.shape.classes);
  RowTeam<kThreads> team;
  for (std::int64_t row = team.first_row(); row < launch.shape.rows; row += team.row_step()) {
    const std::int64_t first = row * launch.shape.classes;
    const S* x = static_cast<const S*>(launch.logits) + first;
    const RowVectors<S, kVec, kEntropyKept, kThreads> logits(launch.logits, first, classes,
                                                             team.lane);
    // A logit of the row: threads without any keep it, at a sum of 0.
    OnlineSums<T, kThreads> online{widen(x[0]), T(0), {}};
    logits.for_each([&](std::uint32_t vector, const RawVec<S, kVec>& raw) {
      T values[kVec];
      widen_all(raw, values);
      const std::uint32_t left = classes - vector * kVec;
      online.add(values, left < kVec ? static_cast<int>(left) : kVec);
      online.sums.end_vector(vector);
    });
    online.move_to(team.largest(online.largest));
    double exponentials;
    double below;
    online.sums.template over_team<kVec>(team, classes, [&](const auto& totals) {
      exponentials = static_cast<double>(totals[0]);
      below = static_cast<double>(totals[1]);
    });
    if (team.lane != 0) continue;
    const double largest = static_cast<double>(online.largest);
    const double log_sum = log_of_sum(exponentials);
    const T lse = static_cast<T>(largest + log_sum);
    static_cast<T*>(launch.log_sum_exp)[row] = lse;
    static_cast<T*>(launch.rest)[row] =
        static_cast<T>(rest_of(static_cast<double>(lse), largest, log_sum));
    const std::int64_t label = launch.labels.labels[row];
    if (launch.labels.is_ignored(row)) {
      store_channel(launch.losses, row, 0.0);
      continue;
    }
    const bool known = label >= 0 && label < launch.shape.classes;
    const double logit = known ? static_cast<double>(widen(x[label])) : nan("");
    const double mean_below = below / static_cast<double>(classes);
    store_channel(launch.losses, row,
                  smoothed_loss(log_sum, logit - largest, mean_below, launch.smoothing));
  }
}

template <class S, std::uint32_t kThreads>
__global__ void __launch_bounds__(kRowThreads, kEntropyBlocks)
    softmax_cross_entropy_backward_kernel(const CrossEntropyBackwardArgs __grid_constant__ launch) {
  using T = RowCompute<S>;
  constexpr int kVec = kRowVec<S>;
  const auto classes = static_cast<std::uint32_t>(launch.shape.classes);
  const T floor = static_cast<T>(launch.smoothing) / static_cast<T>(classes);
  RowTeam<kThreads> team;
  for (std::int64_t row = team.first_row(); row < launch.shape.rows; row += team.row_step()) {
    const std::int64_t first = row * launch.shape.classes;
    const std::int64_t label = launch.labels.labels[row];
    const bool ignored = launch.labels.is_ignored(row);
    const bool known = label >= 0 && label < launch.shape.classes;
    const T lse = static_cast<const T*>(launch.log_sum_exp)[row];
    const T rest = launch.rest == nullptr ? T(0) : static_cast<const T*>(launch.rest)[row];
    const T grad_loss = known ? static_cast<T>(load_channel(launch.grad_losses, row, 0.0))
                              : static_cast<T>(nan(""));
    const RowVectors<S, kVec, kEntropyKept, kThreads> logits(launch.logits, first, classes,
                                                             team.lane);
    const RowOperand<S, kVec> gradient(launch.grad_logits, first, classes);
    logits.for_each([&](std::uint32_t vector, RawVec<S, kVec> raw) {
#pragma unroll
      for (int pair = 0; pair < kVec / 2; ++pair) {
        T two[2];
        get_pair(raw, pair, two);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const std::int64_t column = std::int64_t{vector} * kVec + 2 * pair + i;
          const T below = column == label ? floor + static_cast<T>(1.0 - launch.smoothing) : floor;
          const T value = grad_logit<T>(two[i], lse, rest, below, grad_loss);
          two[i] = ignored ? T(0) : value;
        }
        set_pair(raw, pair, two);
      }
      gradient.store(vector, raw);
    });
  }
}

/// Calls run(S{}) for the storage type of the logits.
template <class Run>
Status dispatch_logits(DType dtype, const char* what, const Run& run) {
  switch (dtype) {
    case DType::kFloat32:
      return run(float{});
    case DType::kFloat64:
      return run(double{});
    case DType::kFloat16:
      return run(Half{});
    case DType::kBFloat16:
      return run(BFloat16{});
  }
  return Status{cudaErrorInvalidValue, what};
}

/// Starts one of two kernels: for rows of a warp, or of a block.
template <class S, class Args, class Parameter>
Status launch_rows(void (*of_warp)(Parameter), void (*of_block)(Parameter), const Args& args,
                   int multiprocessors, Stream stream, const char* what) {
  constexpr std::int64_t kWarpColumns = kRowWarpThreads * kRowVec<S> * 4;
  const bool warp = args.shape.classes <= kWarpColumns;
  const std::uint32_t teams =
      warp ? RowTeam<kRowWarpThreads>::kTeams : RowTeam<kRowThreads>::kTeams;
  return launch(warp ? of_warp : of_block, args,
                row_blocks(args.shape.rows, teams, multiprocessors, kEntropyBlocks), kRowThreads,
                stream, what);
}

}  // namespace cuda

Status softmax_cross_entropy_cuda(const CrossEntropyArgs& args, int multiprocessors,
                                  Stream stream) {
  using namespace cuda;
  constexpr const char* kWhat = "launch of softmax_cross_entropy_kernel";
  return dispatch_logits(args.shape.logits, kWhat, [&]<class S>(S) {
    return launch_rows<S>(softmax_cross_entropy_kernel<S, kRowWarpThreads>,
                          softmax_cross_entropy_kernel<S, kRowThreads>, args, multiprocessors,
                          stream, kWhat);
  });
}

Status softmax_cross_entropy_backward_cuda(const CrossEntropyBackwardArgs& args,
                                           int multiprocessors, Stream stream) {
  using namespace cuda;
  constexpr const char* kWhat = "launch of softmax_cross_entropy_backward_kernel";
  return dispatch_logits(args.shape.logits, kWhat, [&]<class S>(S) {
    return launch_rows<S>(softmax_cross_entropy_backward_kernel<S, kRowWarpThreads>,
                          softmax_cross_entropy_backward_kernel<S, kRowThreads>, args,
                          multiprocessors, stream, kWhat);
  });
}

}  // namespace torchfuse::kernels
