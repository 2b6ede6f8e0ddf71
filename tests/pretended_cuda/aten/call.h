// SPDX-License-Identifier: BSD-3-Clause
// One call of an ATen op on CUDA tensors, computed by the CPU's kernel over the same memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/cuda/PhiloxCudaState.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "host_view.h"

namespace pretended_cuda {

/// Note [How a call is redirected]
/// At once, where nothing is pending on the stream: the CPU's kernel runs on views of the
/// arguments' memory, results that are new are copied into CUDA tensors. Later, where the stream
/// has to wait or records: the results' sizes come from the op's meta kernel, and a closure that
/// owns no memory of the device is handed to the stream. An op whose results cannot be known
/// before, or whose arguments overlap, waits for the stream.
class Call {
 public:
  /// `arguments` are the op's, on CUDA.
  Call(const c10::OperatorHandle& op, torch::jit::Stack arguments);

  [[nodiscard]] c10::Device device() const { return *device_; }
  /// The results, after the op was computed.
  torch::jit::Stack run_at_once();
  /// The results, which the stream will compute; nothing if they cannot be known before.
  std::optional<torch::jit::Stack> run_later();

 private:
  struct Later;
  at::Tensor view_of(const at::Tensor& cuda, bool written);
  void replace_arguments();
  void check_devices() const;
  void resize_outputs() const;
  [[nodiscard]] bool overlaps() const;
  at::Tensor result_on_device(const at::Tensor& result, const Pairs& known);
  static void compute(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                      const std::optional<std::size_t>& generator_at,
                      const std::optional<at::PhiloxCudaState>& random);

  c10::OperatorHandle op_;
  torch::jit::Stack arguments_;
  torch::jit::Stack replaced_;  ///< the arguments on the CPU
  std::optional<c10::Device> device_;
  HostViews views_;
  Pairs on_device_;  ///< view on the CPU -> CUDA tensor
  Pairs empty_;      ///< stand-in on the CPU -> empty CUDA tensor that may grow
  std::optional<std::size_t> generator_at_;
  std::optional<at::PhiloxCudaState> random_;
};

}  // namespace pretended_cuda
