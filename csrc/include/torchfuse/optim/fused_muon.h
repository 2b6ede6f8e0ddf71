// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <torch/arg.h>
#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <torchfuse/export.h>
#include <torchfuse/optim/fused_optimizer.h>
#include <torchfuse/optim/fused_options.h>

namespace torchfuse::optim {

/// FusedMuon's hyper-parameters, with names and defaults from torch.optim.Muon.
struct TORCHFUSE_API FusedMuonOptions : public FusedOptionsOf<FusedMuonOptions> {
  using betas_t = std::tuple<double, double>;  ///< as in torch::optim::AdamOptions
  using ns_coefficients_t = std::tuple<double, double, double>;  ///< a, b and c of an iteration

  /// Converts a learning rate to options, as torch's options do.
  // NOLINTNEXTLINE(google-explicit-constructor)
  FusedMuonOptions(double lr = 1e-3) : FusedOptionsOf(lr) {}

  TORCH_ARG(double, weight_decay) = 0.1;  ///< decoupled weight decay, >= 0
  TORCH_ARG(double, momentum) = 0.95;     ///< decay rate of the momentum, in [0, 1)
  TORCH_ARG(bool, nesterov) = true;       ///< Nesterov momentum
  /// Coefficients of the Newton-Schulz iteration; see torchfuse::fused_muon_().
  TORCH_ARG(ns_coefficients_t, ns_coefficients) = std::make_tuple(3.4445, -4.775, 2.0315);
  /// Use the coefficients of Amsel et al. 2025, which converge, in the place of ns_coefficients.
  TORCH_ARG(bool, polar_express) = false;
  /// Smallest norm by which a matrix is divided, >= 0; without use_muon, AdamW's eps.
  TORCH_ARG(double, eps) = 1e-7;
  TORCH_ARG(std::int64_t, ns_steps) = 5;  ///< number of iterations, from 1 to 99
  /// Factor of the learning rate of a matrix with r rows and c columns: `nullopt` or "original" is
  /// sqrt(max(1, r / c)), "match_rms_adamw" is 0.2 sqrt(max(r, c)), "spectral_unclamped" is
  /// sqrt(r / c).
  TORCH_ARG(std::optional<std::string>, adjust_lr_fn) = std::nullopt;
  /// The group's parameters are matrices. If false, AdamW updates the group.
  TORCH_ARG(bool, use_muon) = true;
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);  ///< AdamW's decay rates, in [0, 1)
  /// Dtype of the iterations, kFloat or kBFloat16. `nullopt` (default): kBFloat16 on CUDA devices
  /// and on processors that multiply in bf16, else kFloat. fp64 parameters iterate in fp64.
  TORCH_ARG(std::optional<at::ScalarType>, ns_dtype) = std::nullopt;
  /// Multiply matrices of one shape together. If false, a matrix's result does not depend on other
  /// matrices, bit for bit, and so not on how many ranks share the matrices.
  TORCH_ARG(bool, ns_batched) = true;
  /// Number of last dimensions that form a matrix: 0 (default) for all of them, or at least 2. A
  /// parameter with more dimensions is a stack of matrices, such as a layer's experts.
  TORCH_ARG(std::int64_t, matrix_dims) = 0;
  /// The group's matrices are clipped apart: their gradients have one norm, and all other gradients
  /// have another. max_grad_norm limits each.
  TORCH_ARG(bool, clip_apart) = false;
};

/// Per-parameter state, with names from torch.optim.Muon and AdamW.
struct TORCHFUSE_API FusedMuonParamState
    : public FusedParamStateOf<FusedMuonParamState, FusedMuonOptions> {
  TORCH_ARG(torch::Tensor, exp_avg) = {};          ///< moving average of gradients (AdamW)
  TORCH_ARG(torch::Tensor, exp_avg_sq) = {};       ///< moving average of their squares (AdamW)
  TORCH_ARG(torch::Tensor, momentum_buffer) = {};  ///< moving average of gradients (Muon)
};

extern template struct FusedOptionsOf<FusedMuonOptions>;
extern template struct FusedParamStateOf<FusedMuonParamState, FusedMuonOptions>;
extern template class FusedOptimizerOf<FusedMuonOptions, FusedMuonParamState>;

/// Muon for matrices and AdamW for all other parameters, in one step; see torchfuse::fused_muon_()
/// for the formula. All parameters share one gradient norm (two with clip_apart), loss scale and
/// decision to skip.
///
///     using torchfuse::optim::FusedMuon;
///     using torchfuse::optim::FusedMuonOptions;
///     FusedMuon optimizer(FusedMuon::split(*model, FusedMuonOptions(0.02),
///     FusedMuonOptions(3e-4)),
///                         FusedMuonOptions(0.02));
///
/// @throws c10::Error for options out of range, naming the option and the group. The first step()
///   throws for a parameter that is no matrix in a group with use_muon.
class TORCHFUSE_API FusedMuon : public FusedOptimizerOf<FusedMuonOptions, FusedMuonParamState> {
 public:
  using ParamGroups = std::vector<torch::optim::OptimizerParamGroup>;  ///< parameter groups

  /// Constructs an optimizer with these groups. Groups without options are divided with split(),
  /// and get `defaults`.
  explicit FusedMuon(const ParamGroups& param_groups, FusedMuonOptions defaults = {});
  /// Divides the parameters with split().
  explicit FusedMuon(const std::vector<torch::Tensor>& params, FusedMuonOptions defaults = {});

  /// Divides parameters into a group of matrices, which have at least two dimensions, and a group
  /// for AdamW. A group without parameters is left out.
  /// @param params parameters.
  /// @param matrices options of the matrices.
  /// @param others options of the other parameters; use_muon is set to false. `nullopt` (default)
  ///   means `matrices` with an eps of 1e-8.
  static ParamGroups split(const std::vector<torch::Tensor>& params,
                           const FusedMuonOptions& matrices = {},
                           const std::optional<FusedMuonOptions>& others = std::nullopt);
  /// Like split() of parameters, but the weights of torch::nn::Embedding and EmbeddingBag and the
  /// parameters named `adamw`, such as "head.weight", are not matrices. Parameters that require no
  /// gradient are left out.
  /// @throws c10::ValueError for a name that no parameter has.
  static ParamGroups split(const torch::nn::Module& model, const FusedMuonOptions& matrices = {},
                           const std::optional<FusedMuonOptions>& others = std::nullopt,
                           const std::vector<std::string>& adamw = {});
};

}  // namespace torchfuse::optim
