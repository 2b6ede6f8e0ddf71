// SPDX-License-Identifier: BSD-3-Clause
// DTensors: what of them lies in this process, and their gradients for the time of a step.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace torchfuse::bindings {

/// The DTensors of one parameter and its state, with the local tensors that the plan was made for.
class Shards {
 public:
  explicit Shards(pybind11::handle param) : param_(local(param)) {}

  const at::Tensor& param() const { return param_; }

  /// The local tensor of `tensor`, or `tensor` itself if it is no DTensor.
  at::Tensor local(pybind11::handle tensor);

  /// Whether each DTensor still has the local tensor that local() returned.
  bool unchanged() const;

 private:
  std::vector<std::pair<pybind11::object, pybind11::object>> locals_;
  at::Tensor param_;  ///< local
};

// Note [Lent gradients]
// The native step reads the gradient of a parameter from its own .grad. The local tensor of a
// DTensor has none, since autograd knows the DTensor alone; so it gets one for the time of the
// step.
class LentGradients {
 public:
  LentGradients() = default;
  ~LentGradients();
  LentGradients(const LentGradients&) = delete;
  LentGradients& operator=(const LentGradients&) = delete;
  LentGradients(LentGradients&&) = delete;
  LentGradients& operator=(LentGradients&&) = delete;

  /// Lends `local` the local gradient of the DTensor `param`, params[index], if it has one.
  /// @throws c10::TypeError, c10::ValueError for a gradient that is placed in another way.
  void lend(pybind11::handle param, const at::Tensor& local, std::size_t index);

  /// Tells autograd that the step wrote to the parameters (and to their gradients).
  void mark_written(bool grads) const;

 private:
  struct Lent {
    at::Tensor local;
    at::Tensor param;
    at::Tensor grad;
  };
  std::vector<Lent> lent_;
};

}  // namespace torchfuse::bindings
