// SPDX-License-Identifier: BSD-3-Clause
// FusedMuon's options and states, and the division of parameters.
#include <torchfuse/optim/fused_muon.h>

#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <memory>
#include <set>
#include <utility>

#include "api/optim/fused_optimizer_step.h"

namespace torchfuse::optim {

template <>
struct OptionsTraits<FusedMuonOptions> : Named<"FusedMuon", "muon"> {
  TORCHFUSE_FIELDS(options, weight_decay, momentum, nesterov, ns_coefficients, polar_express, eps,
                   ns_steps, adjust_lr_fn, use_muon, betas, ns_dtype, ns_batched, matrix_dims,
                   clip_apart)
  TORCHFUSE_FIELDS(states, exp_avg, exp_avg_sq, momentum_buffer)

  static bool uses_state(const FusedMuonOptions& options, std::size_t index) {
    return options.use_muon() == (index == 2);
  }

  template <class Visit>
  static void derived(const FusedMuonOptions& options, const Visit& visit) {
    const auto [a, b, c] = options.ns_coefficients();
    visit(OptionPart{"ns_a"}, a);
    visit(OptionPart{"ns_b"}, b);
    visit(OptionPart{"ns_c"}, c);
    const auto flag = [&](const char* name, bool value) {
      visit(OptionPart{name}, value ? 1.0 : 0.0);
    };
    flag("match_rms_adamw", options.adjust_lr_fn() == "match_rms_adamw");
    flag("spectral_unclamped", options.adjust_lr_fn() == "spectral_unclamped");
    flag("ns_float32", options.ns_dtype() == at::kFloat);
    flag("ns_bfloat16", options.ns_dtype() == at::kBFloat16);
  }

  static void check(const FusedMuonOptions& options, const std::string& owner) {
    const std::string adjust = options.adjust_lr_fn().value_or("original");
    TORCH_CHECK_VALUE(
        adjust == "original" || adjust == "match_rms_adamw" || adjust == "spectral_unclamped",
        kName, ": expected ", owner, ".adjust_lr_fn to be none, original, match_rms_adamw or ",
        "spectral_unclamped, got ", adjust, ".");
    const at::ScalarType dtype = options.ns_dtype().value_or(at::kFloat);
    TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kBFloat16, kName, ": expected ", owner,
                      ".ns_dtype to be none, Float or BFloat16, got ", dtype, ".");
    TORCH_CHECK_VALUE(options.matrix_dims() != 1, kName, ": expected ", owner,
                      ".matrix_dims to be 0 or at least 2, got 1.");
  }
};

TORCHFUSE_DEFINE_OPTIMIZER(FusedMuon);

namespace {

using ParamGroups = FusedMuon::ParamGroups;

FusedMuonOptions for_adamw(const FusedMuonOptions& matrices,
                           const std::optional<FusedMuonOptions>& others) {
  if (others.has_value()) return FusedMuonOptions(*others).use_muon(false);
  return FusedMuonOptions(matrices).use_muon(false).eps(1e-8);
}

ParamGroups groups_of(std::vector<torch::Tensor> matrices, std::vector<torch::Tensor> others,
                      const FusedMuonOptions& own, const std::optional<FusedMuonOptions>& adamw) {
  ParamGroups groups;
  if (!matrices.empty()) {
    groups.emplace_back(std::move(matrices),
                        std::make_unique<FusedMuonOptions>(FusedMuonOptions(own).use_muon(true)));
  }
  if (!others.empty()) {
    groups.emplace_back(std::move(others),
                        std::make_unique<FusedMuonOptions>(for_adamw(own, adamw)));
  }
  return groups;
}

bool is_matrix(const torch::Tensor& param) {
  return param.defined() && param.dim() >= 2 && param.numel() != 0;
}

/// Returns the groups, with those that have no options divided.
ParamGroups divided(const ParamGroups& groups, const FusedMuonOptions& defaults) {
  ParamGroups result;
  for (const torch::optim::OptimizerParamGroup& group : groups) {
    if (group.has_options()) {
      result.push_back(group);
      continue;
    }
    for (auto& part : FusedMuon::split(group.params(), defaults)) result.push_back(part);
  }
  return result;
}

/// Returns the weights of the model's embeddings, which tied layers may share.
std::set<const c10::TensorImpl*> embeddings_of(const torch::nn::Module& model) {
  std::set<const c10::TensorImpl*> weights;
  const auto insert_weight = [&](const torch::nn::Module& module) {
    if (const auto* one = module.as<torch::nn::Embedding>()) {
      weights.insert(one->weight.unsafeGetTensorImpl());
    }
    if (const auto* bag = module.as<torch::nn::EmbeddingBag>()) {
      weights.insert(bag->weight.unsafeGetTensorImpl());
    }
  };
  insert_weight(model);
  // torch returns the model itself only if a shared_ptr holds it.
  for (const auto& module : model.modules(/*include_self=*/false)) insert_weight(*module);
  return weights;
}

}  // namespace

FusedMuon::FusedMuon(const ParamGroups& param_groups, FusedMuonOptions defaults)
    : FusedOptimizerOf(divided(param_groups, defaults), defaults) {}

FusedMuon::FusedMuon(const std::vector<torch::Tensor>& params, FusedMuonOptions defaults)
    : FusedOptimizerOf(split(params, defaults), defaults) {}

ParamGroups FusedMuon::split(const std::vector<torch::Tensor>& params,
                             const FusedMuonOptions& matrices,
                             const std::optional<FusedMuonOptions>& others) {
  std::vector<torch::Tensor> left = params;
  const auto middle = std::stable_partition(left.begin(), left.end(), is_matrix);
  return groups_of({left.begin(), middle}, {middle, left.end()}, matrices, others);
}

ParamGroups FusedMuon::split(const torch::nn::Module& model, const FusedMuonOptions& matrices,
                             const std::optional<FusedMuonOptions>& others,
                             const std::vector<std::string>& adamw) {
  const auto named = model.named_parameters();
  std::set<const c10::TensorImpl*> chosen = embeddings_of(model);
  for (const std::string& name : adamw) {
    TORCH_CHECK_VALUE(named.contains(name),
                      "FusedMuon::split: expected adamw to name parameters of the model, got ",
                      name, ", which is none. Choose from model.named_parameters().");
    chosen.insert(named[name].unsafeGetTensorImpl());
  }
  std::set<const c10::TensorImpl*> listed;
  std::vector<torch::Tensor> parts[2];
  for (const torch::Tensor& param : named.values()) {
    if (!param.defined() || !param.requires_grad()) continue;
    const c10::TensorImpl* const impl = param.unsafeGetTensorImpl();
    if (!listed.insert(impl).second) continue;  // tied layers share a parameter
    const bool matrix = is_matrix(param) && chosen.count(impl) == 0;
    parts[matrix ? 0 : 1].push_back(param);
  }
  return groups_of(std::move(parts[0]), std::move(parts[1]), matrices, others);
}

}  // namespace torchfuse::optim
