// SPDX-License-Identifier: BSD-3-Clause
// Parameters, gradients and comparisons for the tests of optimizers.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include <torchfuse/optim/fused_optimizer.h>

#include "../expect_error.h"

namespace torchfuse::testing {

/// Sizes with vector tails, one element, none, and enough for several chunks.
inline std::vector<std::vector<std::int64_t>> test_sizes() {
  return {{37, 5}, {1}, {0}, {129}, {2, 3, 5, 7}};
}

inline std::vector<torch::Tensor> make_params(torch::ScalarType dtype = torch::kFloat) {
  torch::manual_seed(7);
  std::vector<torch::Tensor> params;
  for (const auto& size : test_sizes()) {
    params.push_back(torch::randn(size, torch::kFloat).to(dtype).requires_grad_(true));
  }
  return params;
}

/// New leaves with the values of `params`.
inline std::vector<torch::Tensor> copy_of(const std::vector<torch::Tensor>& params) {
  std::vector<torch::Tensor> copies;
  for (const torch::Tensor& param : params) {
    copies.push_back(param.detach().clone().requires_grad_(true));
  }
  return copies;
}

/// The same gradients for the same `seed`, in each parameter's dtype.
inline void set_grads(const std::vector<torch::Tensor>& params, std::uint64_t seed) {
  torch::manual_seed(seed);
  for (const torch::Tensor& param : params) {
    param.mutable_grad() = torch::randn(param.sizes(), torch::kFloat).to(param.scalar_type());
  }
}

/// Parity after up to 100 steps: 2e-6 in norm, 5e-6 per element relative to max(|expected|, 1e-2).
inline void expect_close(const torch::Tensor& actual, const torch::Tensor& expected) {
  const torch::NoGradGuard no_grad;
  ASSERT_EQ(actual.sizes(), expected.sizes());
  if (actual.numel() == 0) return;
  const torch::Tensor reference = expected.to(torch::kDouble);
  const torch::Tensor difference = actual.to(torch::kDouble) - reference;
  EXPECT_LE(difference.norm().item<double>(), 2e-6 * reference.norm().item<double>());
  const torch::Tensor allowed = 5e-6 * reference.abs().clamp_min(1e-2);
  EXPECT_TRUE((difference.abs() <= allowed).all().item<bool>())
      << "largest difference " << difference.abs().max().item<double>();
}

inline void expect_close(const std::vector<torch::Tensor>& actual,
                         const std::vector<torch::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    SCOPED_TRACE("tensor " + std::to_string(i));
    expect_close(actual[i], expected[i]);
  }
}

inline void expect_equal(const std::vector<torch::Tensor>& actual,
                         const std::vector<torch::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(torch::equal(actual[i], expected[i])) << "tensor " << i;
  }
}

/// What torch warns of while a WarningHandlerGuard of it lives.
struct Warnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;
};

template <class Options, class State>
State& state_of(optim::FusedOptimizerOf<Options, State>& optimizer, const torch::Tensor& param) {
  return static_cast<State&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
}

/// Those of the first group.
template <class Options, class State>
Options& options_of(optim::FusedOptimizerOf<Options, State>& optimizer) {
  return static_cast<Options&>(optimizer.param_groups()[0].options());
}

/// Edits those of every group.
template <class Options, class State, typename Edit>
void edit_options(optim::FusedOptimizerOf<Options, State>& optimizer, const Edit& edit) {
  for (auto& group : optimizer.param_groups()) edit(static_cast<Options&>(group.options()));
}

/// Where an optimizer lists a parameter.
struct Place {
  std::size_t group = 0;
  std::size_t index = 0;

  std::string group_name() const { return c10::str("param_groups[", group, "]"); }
  std::string state_name() const { return c10::str(group_name(), ".state[", index, "]"); }
};

inline Place place_of(torch::optim::Optimizer& optimizer, const torch::Tensor& param) {
  const auto& groups = optimizer.param_groups();
  for (std::size_t group = 0; group < groups.size(); ++group) {
    for (std::size_t i = 0; i < groups[group].params().size(); ++i) {
      if (groups[group].params()[i].is_same(param)) return {group, i};
    }
  }
  ADD_FAILURE() << "the optimizer does not list the parameter";
  return {};
}

/// What was written, to be read.
inline torch::serialize::InputArchive reopened(torch::serialize::OutputArchive& written) {
  std::stringstream stream;
  written.save_to(stream);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  return archive;
}

/// The archive of an optimizer, a scheduler or a scaler.
template <class Saved>
std::string saved(const Saved& object) {
  std::ostringstream stream;
  torch::save(object, stream);
  return stream.str();
}

template <class Loaded>
void load(Loaded& object, const std::string& bytes) {
  std::istringstream stream(bytes);
  torch::load(object, stream);
}

inline void run_steps(torch::optim::Optimizer& optimizer, const std::vector<torch::Tensor>& params,
                      int first, int last) {
  for (int i = first; i < last; ++i) {
    set_grads(params, i);
    optimizer.step();
  }
}

}  // namespace torchfuse::testing
