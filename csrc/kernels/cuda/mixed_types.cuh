// SPDX-License-Identifier: BSD-3-Clause
// The types of the update kernel that serves every table without a kernel of its own.
//
// Note [Mixed storage]
// Parameters, gradients, masters and each state may be stored in any of three types: a kernel for
// every combination would be hundreds. Those that most programs use have their own, with all types
// known at compile time. For the others one kernel per functor and phase looks the type of each
// stream up as it runs: a branch that all threads of the device take alike, beside loads that take
// a hundred times as long.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/common/dtype.h"
#include "kernels/common/tensor_table.h"
#include "kernels/cuda/update_row.cuh"
#include "kernels/fused_optimizer.h"

namespace torchfuse::kernels::cuda {

template <class Functor_>
struct MixedTypes {
  using Functor = Functor_;
  using Params = typename Functor::Params;
  using Compute = float;
  using Coefs = typename Functor::template Coefs<float>;

  static constexpr int kStates = Functor::kNumStates;
  static constexpr int kParamStream = 0;
  static constexpr int kGradStream = 1;
  static constexpr int kStateStream = 2;  ///< the first of kStates
  static constexpr int kMasterStream = kStateStream + kStates;
  static constexpr int kStreams = kMasterStream + 1;

  /// As in UpdateTypes.
  static constexpr bool kStatesMoved = kStatesInMeasure<Functor>;

  using Row = NumberedUpdateRow<kStreams, Layerwise<Functor>>;

  /// Elements per vector: 16 bytes of a 16-bit stream, of which there is at least one.
  static constexpr int kVec = 8;

  /// As in UpdateTypes: up to 160 bytes of loads are in flight.
  static constexpr int kBlocksPerSm = 2;

  /// The types of a launch's streams, and how parameters are rounded.
  struct Storage {
    DType dtypes[kStreams] = {};
    bool master = false;
    bool remainder = false;
    bool stochastic = false;
    std::uint64_t seed = 0;

    Storage() = default;
    explicit Storage(const TensorTable& table)
        : master(table.has_master),
          remainder(table.has_remainder),
          stochastic(table.stochastic),
          seed(table.seed) {
      dtypes[kParamStream] = table.param;
      dtypes[kGradStream] = table.grad;
      for (int k = 0; k < kStates; ++k) dtypes[kStateStream + k] = table.state[k];
      // A remainder is a stream of 16-bit elements; nothing converts it.
      dtypes[kMasterStream] = remainder ? DType::kBFloat16 : DType::kFloat32;
    }

    TORCHFUSE_HOST_DEVICE std::uint32_t element_size(int stream) const {
      return static_cast<std::uint32_t>(size_of(dtypes[stream]));
    }
    TORCHFUSE_HOST_DEVICE bool has_master() const { return master; }
    TORCHFUSE_HOST_DEVICE bool has_remainder() const { return remainder; }
    bool has_stream(int stream) const { return stream != kMasterStream || master || remainder; }
  };
};

}  // namespace torchfuse::kernels::cuda
