// SPDX-License-Identifier: BSD-3-Clause
#include "random.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>

#include <cstdint>
#include <mutex>

namespace pretended_cuda {
namespace {

/// What one call takes of the sequence; CUDA's generator counts in fours.
constexpr std::uint64_t kIncrement = 4;
constexpr std::uint64_t kGoldenRatio = 0x9e3779b97f4a7c15u;

std::uint64_t seed_at(const at::PhiloxCudaState& state) {
  const std::uint64_t seed =
      state.captured_ ? static_cast<std::uint64_t>(*state.seed_.ptr) : state.seed_.val;
  const std::uint64_t offset =
      state.captured_ ? static_cast<std::uint64_t>(*state.offset_.ptr) + state.offset_intragraph_
                      : state.offset_.val;
  return seed + offset * kGoldenRatio;
}

at::CPUGeneratorImpl* default_generator() {
  return at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
}

}  // namespace

at::PhiloxCudaState take_random_state(const std::optional<at::Generator>& given,
                                      c10::Device device) {
  const bool of_device = given && given->defined() && given->device().is_cuda();
  const at::Generator generator = of_device ? *given : at::globalContext().defaultGenerator(device);
  auto* const impl = at::check_generator<at::CUDAGeneratorImpl>(generator);
  const std::lock_guard lock(impl->mutex_);
  return impl->philox_cuda_state(kIncrement);
}

at::Generator host_generator(const at::PhiloxCudaState& state) {
  return at::detail::createCPUGenerator(seed_at(state));
}

DefaultGeneratorAt::DefaultGeneratorAt(const at::PhiloxCudaState& state) {
  const std::uint64_t seed = seed_at(state);
  at::CPUGeneratorImpl* const impl = default_generator();
  const std::lock_guard lock(impl->mutex_);
  saved_ = impl->clone();
  impl->set_current_seed(seed);
}

DefaultGeneratorAt::~DefaultGeneratorAt() {
  at::CPUGeneratorImpl* const impl = default_generator();
  const std::lock_guard lock(impl->mutex_);
  impl->set_engine(saved_->engine());
  impl->set_next_float_normal_sample(saved_->next_float_normal_sample());
  impl->set_next_double_normal_sample(saved_->next_double_normal_sample());
}

}  // namespace pretended_cuda
