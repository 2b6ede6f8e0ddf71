// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/optim/averaged_model.h>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/batchnorm.h>

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>

#include <torchfuse/nn/sync_batch_norm.h>

namespace torchfuse::optim {

namespace {

using Tensors = std::vector<at::Tensor>;
using NamedTensors = torch::OrderedDict<std::string, at::Tensor>;

/// Pairs of tensors for one foreach op.
struct Pairs {
  Tensors averages;
  Tensors values;
};

void check_same_tensors(const NamedTensors& own, const NamedTensors& other, const char* kind) {
  TORCH_CHECK_VALUE(own.size() == other.size(), "AveragedModel: expected a model with ", own.size(),
                    " ", kind, ", like the copied model, got ", other.size(), ".");
  for (std::size_t index = 0; index < own.size(); ++index) {
    const auto& expected = own[index];
    const auto& found = other[index];
    TORCH_CHECK_VALUE(
        expected.key() == found.key() && expected.value().sizes() == found.value().sizes(),
        "AveragedModel: expected ", kind, "[", index, "] to be ", expected.key(), " of sizes ",
        expected.value().sizes(), ", as in the copied model, got ", found.key(), " of sizes ",
        found.value().sizes(), ".");
  }
}

/// Restores torch's default CPU generator. Cloning a module runs its constructor, which draws
/// random initial values.
class KeptGenerator {
 public:
  KeptGenerator() : generator_(at::detail::getDefaultCPUGenerator()) {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    state_ = generator_.get_state();
  }
  ~KeptGenerator() {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    generator_.set_state(state_);
  }
  KeptGenerator(const KeptGenerator&) = delete;
  KeptGenerator& operator=(const KeptGenerator&) = delete;

 private:
  at::Generator generator_;
  at::Tensor state_;
};

/// Copies dtypes, devices and values of all tensors, because clones of plain (not Cloneable) child
/// modules have only the values from their constructors.
void copy_tensors(const NamedTensors& own, const NamedTensors& other,
                  std::optional<c10::Device> device) {
  for (std::size_t index = 0; index < own.size(); ++index) {
    const at::Tensor source = other[index].value().detach();
    at::Tensor target = own[index].value();
    target.set_data(source.to(device.value_or(source.device()), source.scalar_type(),
                              /*non_blocking=*/false, /*copy=*/true));
    target.set_requires_grad(other[index].value().requires_grad());
  }
}

std::shared_ptr<torch::nn::Module> clone_of(const torch::nn::Module& model,
                                            std::optional<c10::Device> device) {
  const at::NoGradGuard no_grad;
  const KeptGenerator kept;
  std::shared_ptr<torch::nn::Module> copy;
  try {
    copy = model.clone(device);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "AveragedModel: expected a model that can be cloned, got ",
                error.what_without_backtrace(),
                " Derive the model's class from torch::nn::Cloneable.");
  }
  const auto parameters = copy->named_parameters();
  const auto buffers = copy->named_buffers();
  check_same_tensors(parameters, model.named_parameters(), "parameters");
  check_same_tensors(buffers, model.named_buffers(), "buffers");
  copy_tensors(parameters, model.named_parameters(), device);
  copy_tensors(buffers, model.named_buffers(), device);
  return copy;
}

/// Tensors to average, by device and dtype of the average, and tensors to copy.
struct Work {
  std::map<std::pair<std::string, at::ScalarType>, Pairs> averaged;
  Pairs copied;

  std::unordered_set<const c10::TensorImpl*> seen;

  void add(const NamedTensors& own, const NamedTensors& other, bool average) {
    for (std::size_t index = 0; index < own.size(); ++index) {
      if (!seen.insert(own[index].value().unsafeGetTensorImpl()).second) continue;
      const at::Tensor target = own[index].value().detach();
      const at::Tensor value = other[index].value().detach();
      // Module::to() may have converted counts among the averages, so ask for the model's dtype.
      const bool lerps = average && (value.is_floating_point() || value.is_complex());
      Pairs& pairs = lerps ? averaged[{target.device().str(), target.scalar_type()}] : copied;
      pairs.averages.push_back(target);
      pairs.values.push_back(lerps ? value.to(target.device(), target.scalar_type()) : value);
    }
  }
};

/// Collects the module and its descendants, each once, parents before children.
void collect(torch::nn::Module& module, std::vector<torch::nn::Module*>& found) {
  if (std::find(found.begin(), found.end(), &module) != found.end()) return;
  found.push_back(&module);
  for (const auto& child : module.children()) collect(*child, found);
}

/// Calls `function` with the module's class if the module is a batch normalization layer.
template <typename Function>
void with_batch_norm(torch::nn::Module& module, Function function) {
  const auto try_as = [&](auto* norm) {
    if (norm != nullptr) function(*norm);
  };
  try_as(module.as<torch::nn::BatchNorm1dImpl>());
  try_as(module.as<torch::nn::BatchNorm2dImpl>());
  try_as(module.as<torch::nn::BatchNorm3dImpl>());
  try_as(module.as<nn::SyncBatchNormImpl>());
}

}  // namespace

AveragedModel::AveragedModel(const torch::nn::Module& model, AveragedModelOptions options)
    : torch::nn::Module("AveragedModel"), options_(std::move(options)) {
  const auto& decay = options_.decay();
  TORCH_CHECK_VALUE(!decay || (*decay >= 0 && *decay <= 1),
                    "AveragedModel: expected decay to be from 0 to 1, got ", decay.value_or(0),
                    ".");
  module_ = register_module("module", clone_of(model, options_.device()));
  n_averaged_ = register_buffer("n_averaged", at::zeros({}, at::TensorOptions(at::kLong)));
}

std::int64_t AveragedModel::n_averaged() const { return n_averaged_.item<std::int64_t>(); }

void AveragedModel::update_parameters(const torch::nn::Module& model) {
  const at::NoGradGuard no_grad;
  const auto parameters = module_->named_parameters();
  const auto buffers = module_->named_buffers();
  const auto model_parameters = model.named_parameters();
  const auto model_buffers = model.named_buffers();
  check_same_tensors(parameters, model_parameters, "parameters");
  check_same_tensors(buffers, model_buffers, "buffers");
  const std::int64_t before = n_averaged();
  Work work;
  work.add(parameters, model_parameters, before > 0);
  work.add(buffers, model_buffers, before > 0 && options_.use_buffers());
  const double weight =
      options_.decay() ? 1 - *options_.decay() : 1 / (static_cast<double>(before) + 1);
  for (auto& [kind, pairs] : work.averaged) {
    at::_foreach_lerp_(pairs.averages, pairs.values, weight);
  }
  for (std::size_t index = 0; index < work.copied.averages.size(); ++index) {
    work.copied.averages[index].copy_(work.copied.values[index]);
  }
  // Module::to() converts the count too, and a 16-bit dtype cannot hold large counts.
  if (n_averaged_.scalar_type() != at::kLong) n_averaged_.set_data(n_averaged_.to(at::kLong));
  n_averaged_.fill_(before + 1);
}

BatchNormUpdate::BatchNormUpdate(torch::nn::Module& model) {
  std::vector<torch::nn::Module*> modules;
  collect(model, modules);
  for (torch::nn::Module* module : modules) {
    // train() also sets the children's modes, which later entries restore.
    restore_.emplace_back([module, mode = module->is_training()] { module->train(mode); });
    with_batch_norm(*module, [&](auto& norm) {
      restore_.emplace_back(
          [&norm, momentum = norm.options.momentum()] { norm.options.momentum(momentum); });
    });
  }
  try {
    for (torch::nn::Module* module : modules) {
      with_batch_norm(*module, [&](auto& norm) {
        norm.reset_running_stats();
        needed_ = needed_ || norm.options.track_running_stats();
        norm.options.momentum(std::nullopt);
      });
    }
    model.train();
  } catch (...) {
    restore();
    throw;
  }
}

BatchNormUpdate::~BatchNormUpdate() { restore(); }

void BatchNormUpdate::restore() noexcept {
  for (const auto& step : restore_) {
    try {
      step();
    } catch (const std::exception& error) {
      TORCH_WARN("update_bn: a module's train() failed, so its mode may not be restored: ",
                 error.what());
    }
  }
}

}  // namespace torchfuse::optim
