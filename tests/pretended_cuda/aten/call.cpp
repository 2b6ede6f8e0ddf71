// SPDX-License-Identifier: BSD-3-Clause
#include "call.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "../runtime/pretended_cuda.h"
#include "allocation.h"
#include "meta_results.h"
#include "ops.h"
#include "random.h"

namespace pretended_cuda {
namespace {

/// The device's memory is open to the host until the end of the scope.
struct OpenMemory {
  OpenMemory() { pretended_cuda_open_memory(); }
  ~OpenMemory() { pretended_cuda_close_memory(); }
  OpenMemory(const OpenMemory&) = delete;
  OpenMemory& operator=(const OpenMemory&) = delete;
};

at::Tensor copy_of_hosts(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  at::Tensor copy = tensor.detach().clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

std::optional<std::size_t> place_of_generator(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "generator") return i;
  }
  return std::nullopt;
}

}  // namespace

Call::Call(const c10::OperatorHandle& op, torch::jit::Stack arguments)
    : op_(op), arguments_(std::move(arguments)), generator_at_(place_of_generator(op.schema())) {
  resize_outputs();
  replace_arguments();
  check_devices();
  if (!device_) device_ = c10::Device(c10::kCUDA, c10::cuda::current_device());
  std::optional<at::Generator> given;
  if (generator_at_ && !arguments_[*generator_at_].isNone()) {
    given = arguments_[*generator_at_].toGenerator();
  }
  if (generator_at_ || op.hasTag(at::Tag::nondeterministic_seeded)) {
    random_ = take_random_state(given, *device_);
  }
}

/// Gives `out=` tensors the results' sizes, as the device's kernels do before they run.
void Call::resize_outputs() const {
  const auto& arguments = op_.schema().arguments();
  const bool has_outputs = std::any_of(
      arguments.begin(), arguments.end(),
      [](const c10::Argument& argument) { return argument.kwarg_only() && is_written(argument); });
  if (!has_outputs) return;
  const auto meta = results_on_meta(op_, arguments_, generator_at_);
  if (!meta->results) return;
  for (const auto& [stand_in, cuda] : meta->shown(arguments_)) {
    if (stand_in.sizes() == cuda.sizes()) continue;
    cuda.resize_(stand_in.sizes());
    if (stand_in.is_non_overlapping_and_dense()) {
      cuda.unsafeGetTensorImpl()->set_sizes_and_strides(stand_in.sizes(), stand_in.strides());
    }
  }
}

/// As torch's own wrappers of CUDA ops: only numbers and indices may be the host's.
void Call::check_devices() const {
  for (const c10::IValue& value : arguments_) {
    for_each_tensor(value, [&](const at::Tensor& tensor) {
      if (!device_ || !tensor.defined() || tensor.device() == *device_) return;
      const bool number = value.isTensor() && tensor.dim() == 0;
      TORCH_CHECK(tensor.device().is_cpu() && (number || value.isOptionalTensorList()),
                  "Expected all tensors to be on the same device, but found at least two devices, ",
                  *device_, " and ", tensor.device(), "! (pretended CUDA, ", op_.schema().name(),
                  ")");
    });
  }
}

at::Tensor Call::view_of(const at::Tensor& cuda, bool written) {
  if (!on_device(cuda)) return cuda;
  if (!device_) device_ = cuda.device();
  if (written && cuda.numel() == 0) {
    at::Tensor stand_in = at::empty(cuda.sizes(), cuda.options().device(c10::kCPU));
    empty_.add(stand_in, cuda);
    return stand_in;
  }
  at::Tensor view = views_.of(cuda);
  on_device_.add(view, cuda);
  return view;
}

void Call::replace_arguments() {
  const auto& arguments = op_.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = arguments_[i];
    if (value.isDevice() && value.toDevice().is_cuda()) {
      const c10::Device device = value.toDevice();
      if (!device_) {
        device_ =
            device.has_index() ? device : c10::Device(c10::kCUDA, c10::cuda::current_device());
      }
      replaced_.emplace_back(c10::Device(c10::kCPU));
      continue;
    }
    const bool written = is_written(arguments[i]);
    replaced_.push_back(
        map_tensors(value, [&](const at::Tensor& tensor) { return view_of(tensor, written); }));
  }
}

void Call::compute(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                   const std::optional<std::size_t>& generator_at,
                   const std::optional<at::PhiloxCudaState>& random) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  std::optional<DefaultGeneratorAt> default_generator;
  if (generator_at) stack[*generator_at] = host_generator(*random);
  if (random && !generator_at) default_generator.emplace(*random);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

/// The CUDA tensor of a result on the CPU or on meta: an argument, a view of one, or a new one.
at::Tensor Call::result_on_device(const at::Tensor& result, const Pairs& known) {
  if (!result.defined()) return result;
  if (const at::Tensor* argument = known.find(result)) return *argument;
  if (at::Tensor view = known.find_storage(result); view.defined()) return view;
  return empty_for_result(result, *device_);
}

torch::jit::Stack Call::run_at_once() {
  torch::jit::Stack stack = replaced_;
  const OpenMemory open;
  compute(op_, stack, generator_at_, random_);
  Pairs known = on_device_;
  for (const auto& [stand_in, cuda] : empty_) {
    known.add(stand_in, cuda);
    if (stand_in.sizes() == cuda.sizes()) continue;
    cuda.resize_(stand_in.sizes());
    host_view(cuda).copy_(stand_in);
  }
  torch::jit::Stack results;
  for (const c10::IValue& value : stack) {
    results.push_back(map_tensors(value, [&](const at::Tensor& result) {
      const at::Tensor cuda = result_on_device(result, known);
      const bool is_new = result.defined() && known.find(result) == nullptr &&
                          !known.find_storage(result).defined();
      if (is_new) host_view(cuda).copy_(result);
      return cuda;
    }));
  }
  return results;
}

/// What a stream holds of a call: views and copies, no memory of the device.
struct Call::Later {
  c10::OperatorHandle op;
  std::string name;
  torch::jit::Stack arguments;
  std::optional<std::size_t> generator_at;
  std::optional<at::PhiloxCudaState> random;
  std::vector<at::Tensor> views;  ///< of arguments
  std::vector<at::Tensor> fresh;  ///< by result: a view of it, or undefined if it is an argument

  [[nodiscard]] bool is_argument(const at::Tensor& result) const {
    for (const at::Tensor& view : views) {
      if (result.is_same(view) || result.storage().is_alias_of(view.storage())) return true;
    }
    return false;
  }

  void take(const at::Tensor& result, const at::Tensor& place) const {
    if (!result.defined()) return;
    if (!place.defined()) {
      TORCH_CHECK(is_argument(result), name, " has a new result where its meta kernel said none");
      return;
    }
    // What the CPU leaves out, CUDA leaves as it is, as statistics of an evaluation.
    if (result.numel() == 0) return;
    TORCH_CHECK(result.sizes() == place.sizes(), name, " has a result of sizes ", result.sizes(),
                " where its meta kernel said ", place.sizes());
    place.copy_(result);
  }

  void run() const {
    torch::jit::Stack stack = arguments;
    compute(op, stack, generator_at, random);
    std::size_t next = 0;
    for (const c10::IValue& value : stack) {
      for_each_tensor(value, [&](const at::Tensor& result) {
        TORCH_CHECK(next < fresh.size(), name, " has more results than its meta kernel said");
        take(result, fresh[next++]);
      });
    }
    TORCH_CHECK(next == fresh.size(), name, " has fewer results than its meta kernel said");
  }
};

/// Which the CPU's kernel may refuse, and Python's meta kernels do not see.
bool Call::overlaps() const {
  bool found = false;
  for (std::size_t i = 0; i < arguments_.size(); ++i) {
    if (!arguments_[i].isTensor() || !is_written(op_.schema().arguments()[i])) continue;
    for (const auto& [view, cuda] : on_device_) {
      found = found || at::get_overlap_status(arguments_[i].toTensor(), cuda) ==
                           at::MemOverlapStatus::Partial;
    }
  }
  return found;
}

std::optional<torch::jit::Stack> Call::run_later() {
  if (differs_from_meta(op_) || overlaps()) return std::nullopt;
  const auto meta = results_on_meta(op_, arguments_, generator_at_);
  if (!meta->results) return std::nullopt;
  const Pairs shown = meta->shown(arguments_);
  auto later =
      std::make_unique<Later>(Later{op_, op_.schema().name(), {}, generator_at_, random_, {}, {}});
  // Views of what the arguments are now; the host's tensors as they are now.
  HostViews views;
  for (std::size_t i = 0; i < arguments_.size(); ++i) {
    later->arguments.push_back(map_tensors(replaced_[i], [&](const at::Tensor& tensor) {
      const at::Tensor* cuda = on_device_.find(tensor);
      if (cuda == nullptr) cuda = empty_.find(tensor);
      if (cuda == nullptr) return copy_of_hosts(tensor);
      later->views.push_back(views.of(*cuda));
      return later->views.back();
    }));
  }
  torch::jit::Stack results;
  for (const c10::IValue& value : *meta->results) {
    results.push_back(map_tensors(value, [&](const at::Tensor& result) {
      const at::Tensor cuda = result_on_device(result, shown);
      const bool is_new = result.defined() && shown.find(result) == nullptr &&
                          !shown.find_storage(result).defined();
      later->fresh.push_back(is_new ? host_view(cuda) : at::Tensor());
      return cuda;
    }));
  }
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device_->index()).stream();
  const auto run = [](void* context) {
    static_cast<const Later*>(context)->run();
    return 1;
  };
  const auto destroy = [](void* context) { delete static_cast<Later*>(context); };
  const pretended_cuda_work work{"an ATen op", run, destroy, later.release(), 0};
  C10_CUDA_CHECK(pretended_cuda_submit(stream, &work));
  return results;
}

}  // namespace pretended_cuda
