// SPDX-License-Identifier: BSD-3-Clause
// Averages gradients over a group while backward runs.
//
// Note [Phases of a reduction]
//     idle       no backward is expected
//     local      after a forward within no_sync: gradients are only noted
//     forwarded  after another forward: the first gradient begins a reduction
//     backward   until the end of that backward, where the engine calls finish()
//
// Hooks run after AccumulateGrad, when a parameter's gradient is complete. Each gradient is scaled
// and copied into its bucket's memory. A bucket is reduced as soon as all its members have arrived
// and all earlier buckets have been launched, so all ranks reduce in the same order. finish() waits
// for the reductions. Scaling happens before or in the reduction, so that nothing writes to a
// bucket in flight.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>
#include <torchfuse/parallel/distributed_data_parallel.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "api/parallel/buckets.h"
#include "api/parallel/collectives.h"

namespace torchfuse::parallel {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  /// @param parameters the parameters that require gradients, in module order.
  Reducer(NamedTensors parameters, Collectives collectives,
          const DistributedDataParallelOptions& options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Installs the hooks. Call this function once, after std::make_shared, because hooks need an
  /// owner.
  void install_hooks();
  /// Prepares for a forward that records gradients.
  void before_forward(bool sync);
  /// Returns whether no backward has begun since the last forward outside no_sync; equal on all
  /// ranks.
  bool awaits_backward() const;
  std::vector<std::vector<std::string>> bucket_names() const;

 private:
  enum class Phase { kIdle, kLocal, kForwarded, kBackward };
  // std::shared_ptr or c10::intrusive_ptr, depending on the torch version.
  using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<at::Tensor>()));

  /// Properties that a parameter and its gradient must keep.
  struct Form {
    at::ScalarType dtype;
    at::Device device;
    std::vector<std::int64_t> sizes;

    bool fits(const at::Tensor& tensor) const;
    std::string described() const;
  };
  struct TrackedGrad {
    TrackedGrad(std::string name, Form form) : name(std::move(name)), form(std::move(form)) {}

    std::string name;
    Form form;
    NodePtr accumulator;  ///< owned here, because torch keeps only a weak reference
    std::uintptr_t hook = 0;
    at::Tensor view;  ///< the gradient's view into its bucket
    std::size_t bucket = 0;
    bool ready = false;  ///< arrived in the current backward
    bool used = false;   ///< since the last reduction
    at::Tensor kept;     ///< old gradient, if this backward did not reach the parameter
  };
  struct Bucket {
    at::Tensor flat;
    std::vector<std::size_t> members;
    std::size_t missing = 0;  ///< members that are not ready
    bool averages = false;    ///< whether the backend averages
    Pending pending;
  };

  class Hook;
  void on_gradient(std::size_t index, bool defined);
  void begin_backward();
  void mark_ready(std::size_t index);
  void finish();

  void form_buckets(const std::vector<std::size_t>& order);
  void rebuild_buckets();
  void launch_complete_buckets();
  void wait_for_buckets();
  void copy_gradient(std::size_t index);
  void check_gradient(std::size_t index, const at::Tensor& grad) const;
  void install_hook(std::size_t index);
  void check_parameters();
  [[noreturn]] void throw_for_unused(const std::vector<std::size_t>& missing);
  void fill_in(std::size_t index);
  at::Tensor ranks_using() const;
  void finish_unused(const std::vector<std::size_t>& missing);
  std::string names_of(const std::vector<std::size_t>& indices) const;

  Collectives collectives_;
  BucketSizes sizes_;
  bool find_unused_;
  std::vector<at::Tensor> parameters_;
  std::vector<TrackedGrad> tracked_;
  std::vector<Bucket> buckets_;
  std::size_t next_ = 0;              ///< next bucket to reduce
  std::vector<std::size_t> arrived_;  ///< order of arrival in the current backward
  std::vector<std::size_t> observed_order_;
  bool reordered_ = false;
  bool awaits_backward_ = false;
  Phase phase_ = Phase::kIdle;
  // Gradients on several devices arrive on several threads.
  mutable std::mutex mutex_;
};

}  // namespace torchfuse::parallel
