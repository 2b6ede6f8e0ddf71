// SPDX-License-Identifier: BSD-3-Clause
// Softmax cross entropy. A warp handles a short row, and a block of 256 threads a long row. Bytes
// per logit: one read in each pass, and one write in the backward pass. Logits are read in aligned
// 16-byte vectors. A row may begin at any address: the elements before the first vector and after
// the last vector are read one by one.
#include "kernels/softmax_cross_entropy.h"

#include "kernels/cuda/rows.cuh"

namespace torchfuse::kernels {

namespace cuda {

constexpr int kEntropyBlocks = 4;  ///< resident on a multiprocessor
constexpr int kWarpVectors = 4;    ///< a warp handles rows of up to so many vectors per thread
// Vectors that a thread loads before the first use, as many as 64 registers allow. The forward pass
// compares all of them with the largest logit at once.
template <class S>
constexpr std::uint32_t kForwardInFlight = sizeof(S) == 4 ? 4 : 2;
template <class S>
constexpr std::uint32_t kBackwardInFlight = sizeof(S) == 8 ? 1 : 2;

/// A row of logits as aligned 16-byte vectors and single elements around the vectors. A row has
/// fewer single elements than two vectors have, and fewer than a warp has threads.
template <class S>
struct SplitRow {
  static constexpr std::uint32_t kVec = kRowVec<S>;
  const S* elements;
  std::uint32_t head;     ///< elements before the first vector
  std::uint32_t vectors;  ///< in the row
  std::uint32_t edges;    ///< single elements

  __device__ __forceinline__ SplitRow(const void* data, std::int64_t first, std::uint32_t columns)
      : elements(static_cast<const S*>(data) + first) {
    const auto address = static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(elements));
    const std::uint32_t to_vector = (0u - address) % kVectorBytes / sizeof(S);
    head = to_vector < columns ? to_vector : columns;
    vectors = (columns - head) / kVec;
    edges = columns - vectors * kVec;
  }

  __device__ __forceinline__ std::uint32_t column(std::uint32_t vector) const {
    return head + vector * kVec;
  }
  /// Returns the column of a single element.
  __device__ __forceinline__ std::uint32_t edge_column(std::uint32_t edge) const {
    return edge < head ? edge : column(vectors) + (edge - head);
  }
  __device__ __forceinline__ RawVec<S, kVec> load(std::uint32_t vector) const {
    RawVec<S, kVec> raw;
    load_words<kVectorBytes, Keep::kNormal>(
        reinterpret_cast<const unsigned char*>(elements + column(vector)), raw.words);
    return raw;
  }

  /// Calls body(first vector, raw vectors kThreads apart) for a thread's vectors: with kInFlight
  /// vectors per call, and with single vectors at the end.
  template <std::uint32_t kThreads, std::uint32_t kInFlight, class Body>
  __device__ __forceinline__ void for_each(std::uint32_t lane, const Body& body) const {
    std::uint32_t vector = lane;
    for (; vector + (kInFlight - 1) * kThreads < vectors; vector += kInFlight * kThreads) {
      RawVec<S, kVec> raws[kInFlight];
#pragma unroll
      for (std::uint32_t i = 0; i < kInFlight; ++i) raws[i] = load(vector + i * kThreads);
      body(vector, raws);
    }
    for (; vector < vectors; vector += kThreads) {
      RawVec<S, kVec> raws[1] = {load(vector)};
      body(vector, raws);
    }
  }
};

__device__ __forceinline__ float larger_number(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double larger_number(double a, double b) { return fmax(a, b); }

/// A thread's sums of exp(x - largest) and x - largest, in one pass: a larger logit rescales the
/// sums. NaN or positive infinity makes the second sum NaN.
template <class T, std::uint32_t kThreads>
struct OnlineSums {
  T largest;
  T seen = T(0);
  std::uint32_t pending = 0;  ///< vectors whose sums have not been flushed
  RowSums<T, 2, kThreads> sums;

  template <std::uint32_t kCount>
  __device__ __forceinline__ void add(const T (&x)[kCount]) {
    T top = largest;
#pragma unroll
    for (std::uint32_t i = 0; i < kCount; ++i) top = larger_number(top, x[i]);
    move_to(top);
    seen = seen + static_cast<T>(kCount);
    // All logits so far are -inf: they add nothing, and -inf - -inf would be NaN.
    if (top == static_cast<T>(-__builtin_huge_val())) return;
#pragma unroll
    for (std::uint32_t i = 0; i < kCount; ++i) {
      const T below = x[i] - top;
      // The largest logit adds 1, so an exponential below the range does not change the sum.
      const T in_range = larger_number(below, ExpConstants<T>::kLeast);
      sums.recent[0] = sums.recent[0] + exp_in_range<T>(in_range);
      sums.recent[1] = sums.recent[1] + below;
    }
  }

  template <class S, int kVec, std::uint32_t kCount>
  __device__ __forceinline__ void add(const RawVec<S, kVec> (&raws)[kCount]) {
    T x[kCount * kVec];
#pragma unroll
    for (std::uint32_t i = 0; i < kCount * kVec; i += 2) {
      T two[2];
      get_pair(raws[i / kVec], i % kVec / 2, two);
      x[i] = two[0];
      x[i + 1] = two[1];
    }
    add(x);
    pending += kCount;
    if (pending < RowSums<T, 2, kThreads>::kTogether) return;
    sums.flush();
    pending = 0;
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

template <class S, std::uint32_t kThreads>
__global__ void __launch_bounds__(kRowThreads, kEntropyBlocks)
    softmax_cross_entropy_kernel(const CrossEntropyArgs __grid_constant__ launch) {
  using T = RowCompute<S>;
  constexpr std::uint32_t kVec = kRowVec<S>;
  const auto classes = static_cast<std::uint32_t>(launch.shape.classes);
  RowTeam<kThreads> team;
  for (std::int64_t row = team.first_row(); row < launch.shape.rows; row += team.row_step()) {
    const SplitRow<S> x(launch.logits, row * launch.shape.classes, classes);
    // Threads without logits keep the first logit as the largest, and sums of 0.
    OnlineSums<T, kThreads> online{widen(x.elements[0]), T(0), 0, {}};
    x.template for_each<kThreads, kForwardInFlight<S>>(
        team.lane, [&](std::uint32_t, const auto& raws) { online.add(raws); });
    if (team.lane < x.edges) online.add({widen(x.elements[x.edge_column(team.lane)])});
    online.move_to(team.largest(online.largest));
    double exponentials;
    double below;
    online.sums.template over_team<kVec>(team, classes, [&](const auto& totals) {
      exponentials = static_cast<double>(totals[0]);
      below = static_cast<double>(totals[1]);
    });
    if (team.lane != 0) continue;
    if (below != below) exponentials = below;
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
    const double logit = known ? static_cast<double>(widen(x.elements[label])) : nan("");
    const double mean_below = below / static_cast<double>(classes);
    store_channel(launch.losses, row,
                  smoothed_loss(log_sum, logit - largest, mean_below, launch.smoothing));
  }
}

/// The gradient of a row's logits.
template <class T>
struct LogitGradient {
  T lse, rest, floor, at_label, grad_loss;
  std::uint32_t label;  ///< the label's column; no column if the label is invalid

  __device__ __forceinline__ T operator()(T x, std::uint32_t column) const {
    return grad_logit<T>(x, lse, rest, column == label ? at_label : floor, grad_loss);
  }

  template <class S, int kVec>
  __device__ __forceinline__ void apply(RawVec<S, kVec>& raw, std::uint32_t first_column) const {
#pragma unroll
    for (int pair = 0; pair < kVec / 2; ++pair) {
      T two[2];
      get_pair(raw, pair, two);
      const std::uint32_t column = first_column + 2 * static_cast<std::uint32_t>(pair);
      two[0] = (*this)(two[0], column);
      two[1] = (*this)(two[1], column + 1);
      set_pair(raw, pair, two);
    }
  }
};

template <class S, std::uint32_t kThreads>
__global__ void __launch_bounds__(kRowThreads, kEntropyBlocks)
    softmax_cross_entropy_backward_kernel(const CrossEntropyBackwardArgs __grid_constant__ launch) {
  using T = RowCompute<S>;
  const auto classes = static_cast<std::uint32_t>(launch.shape.classes);
  const T floor = static_cast<T>(launch.smoothing) / static_cast<T>(classes);
  RowTeam<kThreads> team;
  for (std::int64_t row = team.first_row(); row < launch.shape.rows; row += team.row_step()) {
    const std::int64_t label = launch.labels.labels[row];
    const bool ignored = launch.labels.is_ignored(row);
    const bool known = label >= 0 && label < launch.shape.classes;
    const LogitGradient<T> gradient{
        static_cast<const T*>(launch.log_sum_exp)[row],
        launch.rest == nullptr ? T(0) : static_cast<const T*>(launch.rest)[row],
        floor,
        floor + static_cast<T>(1.0 - launch.smoothing),
        known ? static_cast<T>(load_channel(launch.grad_losses, row, 0.0))
              : static_cast<T>(nan("")),
        known ? static_cast<std::uint32_t>(label) : ~0u};
    const std::int64_t first = row * launch.shape.classes;
    const SplitRow<S> x(launch.logits, first, classes);
    // A pointer to bytes: nvcc splits vector stores through a pointer that was typed before.
    unsigned char* const result = static_cast<unsigned char*>(launch.grad_logits) +
                                  first * static_cast<std::int64_t>(sizeof(S));
    unsigned char* const vectors = result + x.head * sizeof(S);
    const std::uint32_t width = legal_width(reinterpret_cast<std::uintptr_t>(vectors));
    x.template for_each<kThreads, kBackwardInFlight<S>>(
        team.lane, [&](std::uint32_t vector, auto& raws) {
#pragma unroll
          for (auto& raw : raws) {
            gradient.apply(raw, x.column(vector));
            if (ignored) raw = {};
            store_vec<Keep::kNormal>(vectors + std::size_t{vector} * kVectorBytes, raw, width);
            vector += kThreads;
          }
        });
    if (team.lane >= x.edges) continue;
    const std::uint32_t column = x.edge_column(team.lane);
    const T value = gradient(widen(x.elements[column]), column);
    narrow(ignored ? T(0) : value, reinterpret_cast<S*>(result)[column]);
  }
}

}  // namespace cuda

Status softmax_cross_entropy_cuda(const CrossEntropyArgs& args, int multiprocessors,
                                  Stream stream) {
  using namespace cuda;
  constexpr const char* kWhat = "launch of softmax_cross_entropy_kernel";
  return dispatch_dtype(args.shape.logits, kWhat, [&]<class S>(S) {
    return launch_rows<S, kWarpVectors, kEntropyBlocks>(
        softmax_cross_entropy_kernel<S, kRowWarpThreads>,
        softmax_cross_entropy_kernel<S, kRowThreads>, args, args.shape.classes, multiprocessors,
        stream, kWhat);
  });
}

Status softmax_cross_entropy_backward_cuda(const CrossEntropyBackwardArgs& args,
                                           int multiprocessors, Stream stream) {
  using namespace cuda;
  constexpr const char* kWhat = "launch of softmax_cross_entropy_backward_kernel";
  return dispatch_dtype(args.shape.logits, kWhat, [&]<class S>(S) {
    return launch_rows<S, kWarpVectors, kEntropyBlocks>(
        softmax_cross_entropy_backward_kernel<S, kRowWarpThreads>,
        softmax_cross_entropy_backward_kernel<S, kRowThreads>, args, args.shape.classes,
        multiprocessors, stream, kWhat);
  });
}

}  // namespace torchfuse::kernels
