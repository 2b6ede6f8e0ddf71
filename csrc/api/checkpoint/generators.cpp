// SPDX-License-Identifier: BSD-3-Clause
// Saves and restores torch's default generators.
#include <ATen/ATen.h>
#include <ATen/core/Generator.h>
#include <c10/util/Exception.h>
#include <torch/cuda.h>

#include <mutex>

#include "api/checkpoint/parts.h"

namespace torchfuse::checkpoint {

namespace {

at::Generator default_generator(const c10::Device& device) {
  if (device.is_cuda()) at::globalContext().lazyInitDevice(at::kCUDA);
  return at::globalContext().defaultGenerator(device);
}

std::int64_t cuda_devices() {
  return torch::cuda::is_available() ? static_cast<std::int64_t>(torch::cuda::device_count()) : 0;
}

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

/// Checks a state on a copy of the generator, and returns the function that sets the state.
std::function<void()> prepare(at::Generator generator, const c10::IValue& saved,
                              const std::string& key) {
  const std::string where = "expected the state's " + key;
  TORCH_CHECK_VALUE(saved.isTensor() && saved.toTensor().scalar_type() == at::kByte, where,
                    " to be a uint8 tensor, got ", type_name(saved), ".");
  const at::Tensor state = saved.toTensor();
  try {
    generator.clone().set_state(state);
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(false, where, " to be the state of a generator, got another tensor: ",
                      error.what_without_backtrace());
  }
  return [generator, state]() mutable {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  };
}

}  // namespace

Dict generator_states() {
  Dict states = make_dict();
  states.insert_or_assign("cpu", state_of(default_generator(at::kCPU)));
  List cuda = make_list();
  for (std::int64_t device = 0; device < cuda_devices(); ++device) {
    cuda.push_back(state_of(default_generator({at::kCUDA, static_cast<c10::DeviceIndex>(device)})));
  }
  states.insert_or_assign("cuda", cuda);
  return states;
}

std::function<void()> prepare_generators(const c10::IValue& saved) {
  const Dict states = as_dict(saved, "expected the state of a process");
  std::vector<std::function<void()>> loads;
  loads.push_back(prepare(default_generator(at::kCPU),
                          entry(states, "cpu", "expected the state of a process"), "cpu"));
  const c10::IValue cuda = entry(states, "cuda", "expected the state of a process");
  TORCH_CHECK_VALUE(cuda.isList(), "expected the state's cuda to be a list, got a ",
                    type_name(cuda), ".");
  const auto list = cuda.toList();
  // Ignore the states of devices that this machine lacks.
  for (std::int64_t i = 0; i < std::min<std::int64_t>(cuda_devices(), list.size()); ++i) {
    const c10::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(i));
    loads.push_back(prepare(default_generator(device), list.get(i), "cuda"));
  }
  return [loads] {
    for (const auto& load : loads) load();
  };
}

}  // namespace torchfuse::checkpoint
