// SPDX-License-Identifier: BSD-3-Clause
// Random numbers of redirected ops: the CPU's, from the state of the CUDA generator.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/cuda/PhiloxCudaState.h>
#include <c10/core/Device.h>

#include <memory>
#include <optional>

namespace pretended_cuda {

/// Takes the next piece of the CUDA generator's sequence, once per call of an op. In a capture the
/// place is read at each replay, from the memory that torch fills before it.
at::PhiloxCudaState take_random_state(const std::optional<at::Generator>& given,
                                      c10::Device device);

/// A generator of the CPU at that place. Reads the device's memory if the place was captured.
at::Generator host_generator(const at::PhiloxCudaState& state);

/// For ops that take no generator: the CPU's default generator is at that place, and goes back to
/// where it was at the end.
class DefaultGeneratorAt {
 public:
  explicit DefaultGeneratorAt(const at::PhiloxCudaState& state);
  ~DefaultGeneratorAt();
  DefaultGeneratorAt(const DefaultGeneratorAt&) = delete;
  DefaultGeneratorAt& operator=(const DefaultGeneratorAt&) = delete;

 private:
  std::shared_ptr<at::CPUGeneratorImpl> saved_;
};

}  // namespace pretended_cuda
