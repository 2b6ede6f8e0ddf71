// SPDX-License-Identifier: BSD-3-Clause
#include <torchfuse/nn/sync_batch_norm.h>

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <torch/utils.h>

#include <utility>

#include <torchfuse/batch_norm.h>
#include <torchfuse/collectives.h>

namespace torchfuse::nn {

namespace {

std::optional<at::Tensor> optional(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(SyncBatchNormOptions options_) : options(std::move(options_)) {
  TORCH_CHECK(options.num_features() > 0,
              "SyncBatchNorm: expected num_features to be positive, got ", options.num_features(),
              ".");
  SyncBatchNormImpl::reset();
}

void SyncBatchNormImpl::reset() {
  const std::int64_t channels = options.num_features();
  if (options.affine()) {
    weight = register_parameter("weight", at::empty({channels}));
    bias = register_parameter("bias", at::empty({channels}));
  } else {
    weight = register_parameter("weight", at::Tensor(), /*requires_grad=*/false);
    bias = register_parameter("bias", at::Tensor(), /*requires_grad=*/false);
  }
  if (options.track_running_stats()) {
    running_mean = register_buffer("running_mean", at::zeros({channels}));
    running_var = register_buffer("running_var", at::ones({channels}));
    num_batches_tracked =
        register_buffer("num_batches_tracked", at::zeros({}, at::TensorOptions(at::kLong)));
  }
  reset_parameters();
}

void SyncBatchNormImpl::reset_running_stats() {
  if (!options.track_running_stats()) return;
  const torch::NoGradGuard no_grad;
  running_mean.zero_();
  running_var.fill_(1);
  num_batches_tracked.zero_();
}

void SyncBatchNormImpl::reset_parameters() {
  reset_running_stats();
  if (!options.affine()) return;
  const torch::NoGradGuard no_grad;
  weight.fill_(1);
  bias.zero_();
}

void SyncBatchNormImpl::attach_group(const std::string& group, const std::string& layer_name) {
  options.process_group(group.empty() ? std::nullopt : std::optional<std::string>(group));
  if (!layer_name.empty()) layer_name_ = layer_name;
  agreed_.clear();
}

std::string SyncBatchNormImpl::caller() const {
  const std::string name = layer_name_.empty() ? "" : " '" + layer_name_ + "'";
  return c10::str("SyncBatchNorm", name, "(", options.num_features(), ")");
}

std::optional<std::string> SyncBatchNormImpl::group_to_sync(const at::Tensor& input) {
  const auto& group = options.process_group();
  if (!group || group_size(*group, caller()) == 1) return std::nullopt;
  const std::string agreement = c10::str(*group, " ", input.scalar_type());
  if (agreed_ != agreement) {
    check_same_in_all_ranks({"num_features", "input's dtype (as in c10::ScalarType)"},
                            {options.num_features(), static_cast<int>(input.scalar_type())},
                            input.device(), *group, caller());
    agreed_ = agreement;
  }
  return group;
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input, const at::Tensor& residual) {
  TORCH_CHECK(input.defined() && input.dim() >= 2, caller(), ": expected at least 2D input (got ",
              input.defined() ? input.dim() : 0, "D input)");
  TORCH_CHECK(input.size(1) == options.num_features(), caller(),
              ": expected input to have num_features = ", options.num_features(),
              " channels in dimension 1, got ", input.size(1), ".");
  const bool batch_statistics = is_training() || !running_mean.defined();
  const auto group = is_training() ? group_to_sync(input) : std::nullopt;
  TORCH_CHECK(!batch_statistics || group || input.numel() != input.size(1), caller(),
              ": expected more than 1 value per channel when training, got input size ",
              input.sizes());
  const bool observing = is_training() && options.track_running_stats();
  const bool uses_running = observing || !batch_statistics;
  return std::get<0>(sync_batch_norm(
      input, optional(weight), optional(bias), uses_running ? optional(running_mean) : std::nullopt,
      uses_running ? optional(running_var) : std::nullopt,
      observing ? optional(num_batches_tracked) : std::nullopt, optional(residual),
      /*packed=*/std::nullopt, batch_statistics, options.momentum(), options.eps(),
      options.fuse_relu(), group, caller(), options.deterministic()));
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "torchfuse::nn::SyncBatchNorm(" << options.num_features()
         << ", eps=" << options.eps() << ", momentum=";
  if (options.momentum()) {
    stream << *options.momentum();
  } else {
    stream << "none";
  }
  stream << ", affine=" << options.affine()
         << ", track_running_stats=" << options.track_running_stats()
         << ", fuse_relu=" << options.fuse_relu() << ")";
}

}  // namespace torchfuse::nn
