// SPDX-License-Identifier: BSD-3-Clause
// Kernels for batch normalization's backward pass: gradient sums, then the input's gradient.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/batch_norm_backward.h"
#include "kernels/cuda/batch_norm_kernels.cuh"

namespace torchfuse::kernels::cuda {

/// Returns the terms with which the forward pass normalized a channel.
template <class T>
__device__ __forceinline__ NormalizeTerms<T> forward_terms(const double* saved,
                                                           std::int64_t channels,
                                                           const ChannelInput& weight,
                                                           const ChannelInput& bias,
                                                           std::int64_t c) {
  return normalize_terms<T>(saved[c], saved[channels + c], load_channel(weight, c, 1.0),
                            load_channel(bias, c, 0.0));
}

// --- Gradient sums -------------------------------------------------------------------------------

struct BatchNormBackwardReduceLaunch {
  BatchNormGrid grid;
  BatchNormInput grad_output;
  BatchNormInput input;
  BatchNormInput output;
  BatchNormInput grad_residual;  ///< written
  ChannelInput weight;
  ChannelInput bias;
  ChannelOutput grad_weight;
  ChannelOutput grad_bias;
  bool relu;
  const double* saved;
  double* sums;
  double* partials;
  std::uint32_t* arrivals;  ///< one counter per tile
};

/// A window's operands for the gradient sums.
template <class S>
struct GradWindows {
  RawWindow<S> grad;
  RawWindow<S> input;
  RawWindow<S> output;
};

template <class T>
__device__ __forceinline__ void write_sums(const BatchNormBackwardReduceLaunch& launch,
                                           std::int64_t c, const DeviationSums& total) {
  const std::int64_t channels = launch.grid.channels;
  const GradSums sums =
      grad_sums<T>(total.dy, total.dy_deviation, launch.saved[c], launch.saved[channels + c]);
  launch.sums[c] = sums.dy;
  launch.sums[channels + c] = sums.dy_xhat;
  store_channel(launch.grad_weight, c, sums.dy_xhat);
  store_channel(launch.grad_bias, c, sums.dy);
}

/// Adds a window to the sums and replaces `loaded.grad` by the gradient of the ReLU's input.
/// Gradients outside the window are zero and add nothing.
template <class S, class Terms, class Sums>
__device__ __forceinline__ void add_gradients(const Terms& terms, bool relu, bool has_output,
                                              GradWindows<S>& loaded, Sums& sums) {
  using T = ComputeTypeOf<S>;
  terms.begin_window();
#pragma unroll
  for (int pair = 0; pair < kWindow<S> / 2; ++pair) {
    T dy[2];
    T x[2];
    T y[2];
    get_pair(loaded.grad, pair, dy);
    get_pair(loaded.input, pair, x);
    get_pair(loaded.output, pair, y);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int e = 2 * pair + j;
      const NormalizeTerms<T> term = terms.of(e % Terms::kChannels);
      const T deviation = x[j] - term.center;
      if (relu) {
        const T gate = has_output ? y[j] : normalize(deviation, term.scale, term.shift);
        dy[j] = pass_where_positive(gate, dy[j]);
      }
      sums.add(e, dy[j], dy[j], deviation);
    }
    set_pair(loaded.grad, pair, dy);
  }
}

// Reads gradient and input once, and the output too if it determines the ReLU's gate. May write the
// gradient of the ReLU's input.
template <class S, class Layout, bool kWhole>
__global__ void __launch_bounds__(kGridThreads, kSumBlocks<Layout>)
    batch_norm_backward_reduce_kernel(
        const BatchNormBackwardReduceLaunch __grid_constant__ launch) {
  using T = ComputeTypeOf<S>;
  WindowCursor<S, Layout, kWhole> cursor(launch.grid);
  const ChannelTerms<T, NormalizeTerms<T>, WindowCursor<S, Layout, kWhole>> terms(
      launch.grid, cursor, [&](std::int64_t c) {
        return forward_terms<T>(launch.saved, launch.grid.channels, launch.weight, launch.bias, c);
      });
  const ChannelOperand<S, kWhole> grad_output(launch.grad_output, cursor.base_channel());
  const ChannelOperand<S, kWhole> input(launch.input, cursor.base_channel());
  const ChannelOperand<S, kWhole> output(launch.output, cursor.base_channel());
  const ChannelOperand<S, kWhole> grad_residual(launch.grad_residual, cursor.base_channel());
  const bool relu = launch.relu;
  const bool has_output = relu && launch.output.data != nullptr;
  const bool writes = launch.grad_residual.data != nullptr;
  GradSumsOf<S, Layout> sums(launch.grid);
  using Loaded = GradWindows<S>;
  const auto add = [&](const Window& window, Loaded& loaded) {
    if (window.hi == 0) return;
    add_gradients(terms, relu, has_output, loaded, sums);
    if (writes) store_window(grad_residual, window, loaded.grad);
    sums.end_window();
  };
  constexpr int kLoads = sizeof(S) == 8 ? 1 : 2;
  for_each_round<kLoads>(
      cursor,
      [&](const Window& window) {
        Loaded loaded{load_window(grad_output, window), load_window(input, window), {}};
        if (has_output) loaded.output = load_window(output, window);
        return loaded;
      },
      [&](const auto& windows, auto& loaded) {
#pragma unroll
        for (int k = 0; k < kLoads; ++k) add(windows[k], loaded[k]);
        sums.end_round(kLoads);
      });

  const auto [channel, total] = total_of_slices(launch.grid, cursor, sums.block_sum(launch.grid),
                                                launch.partials, launch.arrivals);
  if (channel >= 0) write_sums<T>(launch, channel, total);
}

// --- The input's gradient ------------------------------------------------------------------------

struct BatchNormBackwardElemtLaunch {
  BatchNormGrid grid;
  BatchNormInput grad_output;
  BatchNormInput input;
  BatchNormInput grad_input;  ///< written
  ChannelInput weight;
  ChannelInput bias;
  bool relu;
  const double* saved;
  const double* sums;
};

template <class T>
struct BackwardTerms {
  NormalizeTerms<T> forward;
  GradInputTerms<T> backward;
};

// Reads gradient and input once, and writes the input's gradient.
template <class S, class Layout, bool kWhole>
__global__ void __launch_bounds__(kGridThreads, kSumBlocks<Layout>)
    batch_norm_backward_elemt_kernel(const BatchNormBackwardElemtLaunch __grid_constant__ launch) {
  using T = ComputeTypeOf<S>;
  WindowCursor<S, Layout, kWhole> cursor(launch.grid);
  const ChannelTerms<T, BackwardTerms<T>, WindowCursor<S, Layout, kWhole>> terms(
      launch.grid, cursor, [&](std::int64_t c) {
        const std::int64_t channels = launch.grid.channels;
        return BackwardTerms<T>{
            forward_terms<T>(launch.saved, channels, launch.weight, launch.bias, c),
            grad_input_terms<T>(
                launch.saved[c], launch.saved[channels + c], load_channel(launch.weight, c, 1.0),
                GradSums{launch.sums[c], launch.sums[channels + c]}, launch.saved[2 * channels])};
      });
  const ChannelOperand<S, kWhole> grad_output(launch.grad_output, cursor.base_channel());
  const ChannelOperand<S, kWhole> input(launch.input, cursor.base_channel());
  const ChannelOperand<S, kWhole> grad_input_operand(launch.grad_input, cursor.base_channel());
  const bool relu = launch.relu;
  struct Loaded {
    RawWindow<S> grad;
    RawWindow<S> input;
  };
  for_each_window<2>(
      cursor,
      [&](const Window& window) {
        return Loaded{load_window(grad_output, window), load_window(input, window)};
      },
      [&](const Window& window, Loaded& loaded) {
        terms.begin_window();
#pragma unroll
        for (int pair = 0; pair < kWindow<S> / 2; ++pair) {
          T dy[2];
          T x[2];
          get_pair(loaded.grad, pair, dy);
          get_pair(loaded.input, pair, x);
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const auto [forward, backward] = terms.of((2 * pair + j) % cursor.kChannels);
            const T deviation = x[j] - forward.center;
            if (relu) {
              dy[j] =
                  pass_where_positive(normalize(deviation, forward.scale, forward.shift), dy[j]);
            }
            x[j] = grad_input(dy[j], deviation, backward.dy_scale, backward.deviation_scale,
                              backward.constant);
          }
          set_pair(loaded.input, pair, x);
        }
        store_window(grad_input_operand, window, loaded.input);
      });
}

}  // namespace torchfuse::kernels::cuda
