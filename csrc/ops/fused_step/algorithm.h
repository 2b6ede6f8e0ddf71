// SPDX-License-Identifier: BSD-3-Clause
// The optimizer-specific part of a fused step: names, hyper-parameters and a functor.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <torchfuse/hyper_params.h>

#include "kernels/common/hyper_param.h"
#include "kernels/fused_optimizer.h"
#include "ops/backend.h"
#include "ops/bucket.h"
#include "ops/check.h"
#include "ops/fused_step/layerwise.h"
#include "ops/fused_step/muon.h"
#include "ops/fused_step/sharding.h"

namespace torchfuse::ops {

/// Reads one group's hyper-parameters and checks the ranges of numbers. A tensor's range is not
/// checked, because its value is only read on the device.
class GroupReader {
 public:
  /// Error messages begin with `caller`. `whose` is, for example, " of group 1". `tensors` receives
  /// device copies of tensor values, which must outlive the launch.
  GroupReader(const char* caller, std::string whose, const std::vector<HyperParamInfo>& infos,
              const std::vector<HyperParam>& values, const c10::Device& device,
              std::vector<at::Tensor>& tensors);

  kernels::ScalarParam number(std::size_t index);
  bool flag(std::size_t index) const;

 private:
  const char* caller_;
  std::string whose_;
  const std::vector<HyperParamInfo>& infos_;
  const std::vector<HyperParam>& values_;
  c10::Device device_;
  std::vector<at::Tensor>& tensors_;
};

class Algorithm {
 public:
  virtual ~Algorithm() = default;
  virtual const char* op() const = 0;
  /// The hyper-parameters in the order of the op's schema.
  virtual const std::vector<HyperParamInfo>& hyper_params() const = 0;
  virtual const std::vector<std::string>& state_names() const = 0;
  /// Number of states that contain one number for the entire tensor; these come last.
  virtual std::size_t num_tensor_states() const = 0;
  /// Reads the groups' values, for tensors on `device`. Error messages begin with `caller`.
  virtual void set_groups(const char* caller, const std::vector<std::vector<HyperParam>>& groups,
                          const c10::Device& device) = 0;
  virtual bool uses_state(std::int64_t group, int state) const = 0;
  /// Like uses_state(group, state), but for values that were never passed to set_groups() and may
  /// be out of range. Does not access a device.
  virtual bool uses_state(const std::vector<HyperParam>& group, int state) const = 0;
  /// Whether update() needs the layouts of the bucket's rows.
  virtual bool needs_layouts() const = 0;
  /// Throws if the algorithm cannot update a parameter with these sizes.
  virtual void check_sizes(const Argument& argument, std::int64_t group,
                           c10::IntArrayRef sizes) const = 0;
  /// Plans what processes exchange of a bucket whose rows have layouts, before anything changes.
  virtual void plan_exchanges(const char* caller, const Bucket& bucket) = 0;
  /// Runs or enqueues a bucket's update. `from_the_end` is as in UpdateArgs. If another pass runs
  /// before the update (LAMB's measure), `from_the_end` applies to that pass, and the update runs
  /// from the beginning.
  virtual void update(const Bucket& bucket, const kernels::StepScalars* scalars,
                      bool write_back_grads, bool from_the_end) = 0;
};

/// Returns the names and ranges in a functor's table.
template <class Functor>
std::vector<HyperParamInfo> hyper_params_in() {
  std::vector<HyperParamInfo> infos;
  for (const auto& entry : Functor::kHyperParams) {
    const kernels::HyperParamRange& range = entry.range;
    infos.push_back({entry.name, entry.flag != nullptr, range.low, range.high,
                     range.may_be_infinite,
                     range.at_least_previous ? infos.back().name : std::string(), range.on_host});
  }
  return infos;
}

/// Runs or enqueues a functor's update of a table on `device`.
template <class Functor>
void update_elements([[maybe_unused]] const char* op, const c10::Device& device,
                     const kernels::UpdateArgs<Functor>& args) {
  if (device.is_cpu()) {
    parallel_over_elements(args.tensors.total(),
                           [&](kernels::CpuIsa isa, std::int64_t begin, std::int64_t end) {
                             kernels::fused_update_cpu<Functor>(isa, args, begin, end);
                           });
    return;
  }
#if defined(TORCHFUSE_WITH_CUDA)
  check_status(op, kernels::fused_update_cuda<Functor>(args, current_stream(device)));
#endif
}

template <class Functor>
class FusedAlgorithm final : public Algorithm {
 public:
  const char* op() const final {
    static const std::string name = std::string("fused_") + Functor::kName + "_";
    return name.c_str();
  }

  const std::vector<HyperParamInfo>& hyper_params() const final {
    static const std::vector<HyperParamInfo> infos = hyper_params_in<Functor>();
    return infos;
  }

  const std::vector<std::string>& state_names() const final {
    static const std::vector<std::string> names(std::begin(Functor::kStateNames),
                                                std::end(Functor::kStateNames));
    return names;
  }

  void set_groups(const char* caller, const std::vector<std::vector<HyperParam>>& groups,
                  const c10::Device& device) final {
    groups_.clear();
    tensors_.clear();
    for (std::size_t g = 0; g < groups.size(); ++g) {
      // An op has only one group, so the op's messages do not name the group.
      const bool is_op = groups.size() == 1 && std::string_view(caller) == op();
      const std::string whose = is_op ? "" : " of group " + std::to_string(g);
      GroupReader reader(caller, whose, hyper_params(), groups[g], device, tensors_);
      groups_.push_back(read(reader));
    }
  }

  std::size_t num_tensor_states() const final {
    if constexpr (kernels::Layerwise<Functor>) return Functor::kTracksNorm ? 1 : 0;
    return 0;
  }

  bool uses_state(std::int64_t group, int state) const final {
    return state >= Functor::kNumStates || Functor::uses_state(groups_[group], state);
  }

  bool uses_state(const std::vector<HyperParam>& group, int state) const final {
    typename Functor::Params params;
    for (std::size_t i = 0; i < std::size(Functor::kHyperParams); ++i) {
      const auto& entry = Functor::kHyperParams[i];
      const auto* number = std::get_if<double>(&group[i]);
      if (entry.flag != nullptr) {
        params.*entry.flag = number != nullptr && *number != 0.0;
      } else if (number != nullptr) {
        (params.*entry.number).value = *number;
      } else {
        (params.*entry.number).pointer = &group[i];  // only tested for null
      }
    }
    return state >= Functor::kNumStates || Functor::uses_state(params, state);
  }

  bool needs_layouts() const final { return kOverMatrices; }

  void check_sizes([[maybe_unused]] const Argument& argument, [[maybe_unused]] std::int64_t group,
                   [[maybe_unused]] c10::IntArrayRef sizes) const final {
    if constexpr (kOverMatrices) check_muon_param(argument, sizes, groups_[group]);
  }

  void plan_exchanges([[maybe_unused]] const char* caller,
                      [[maybe_unused]] const Bucket& bucket) final {
    if constexpr (kOverMatrices) plan_muon_exchanges(caller, bucket, groups_, exchanges_);
  }

  void update(const Bucket& bucket, const kernels::StepScalars* scalars, bool write_back_grads,
              [[maybe_unused]] bool from_the_end) final {
    if constexpr (kOverMatrices) {
      update_muon(op(), bucket, groups_, scalars, write_back_grads, exchanges_);
    } else {
      update_rows(bucket, scalars, write_back_grads, from_the_end);
    }
  }

 private:
  static constexpr bool kOverMatrices = std::is_same_v<Functor, kernels::Muon>;

  void update_rows(const Bucket& bucket, const kernels::StepScalars* scalars, bool write_back_grads,
                   bool from_the_end) {
    kernels::UpdateArgs<Functor> args;
    args.tensors = bucket.table();
    args.groups = groups_.data();
    args.num_groups = static_cast<std::int32_t>(groups_.size());
    args.scalars = scalars;
    args.write_back_grads = write_back_grads;
    args.from_the_end = from_the_end;
    if constexpr (kernels::Layerwise<Functor>) {
      update_layerwise(bucket, args);
    } else {
      update_elements(op(), bucket.key.device, args);
    }
  }

  static typename Functor::Params read(GroupReader& reader) {
    typename Functor::Params params;
    for (std::size_t i = 0; i < std::size(Functor::kHyperParams); ++i) {
      const auto& entry = Functor::kHyperParams[i];
      if (entry.flag != nullptr) {
        params.*entry.flag = reader.flag(i);
      } else {
        params.*entry.number = reader.number(i);
      }
    }
    return params;
  }

  /// See Note [Layerwise optimizers]. On the CPU, a few tensors at a time go through all phases, so
  /// that the update finds the measured data in the caches.
  void update_layerwise(const Bucket& bucket, kernels::UpdateArgs<Functor> args) {
    workspace_.reserve(bucket, Functor::kNumNorms);
    args.norms = workspace_.norms();
    const kernels::MeasureArgs<Functor> measure{args,
                                                bucket.chunk_offsets.data(),
                                                workspace_.partials(),
                                                workspace_.norms(),
                                                nullptr,
                                                bucket.chunk};
    if (bucket.shard_groups == nullptr && bucket.key.device.is_cpu()) {
      update_spans(bucket, measure);
      return;
    }
    if (bucket.shard_groups == nullptr) {
      measure_all(bucket.key.device, measure);
    } else {
      measure_shards(bucket, measure);
    }
    args.from_the_end = false;
    update_elements(op(), bucket.key.device, args);
  }

  void update_spans(const Bucket& bucket, const kernels::MeasureArgs<Functor>& args) const {
    for_each_cached_span(bucket, [&](std::int64_t first, std::int64_t last) {
      const std::int64_t begin = bucket.offsets[first];
      const std::int64_t end = bucket.offsets[last];
      parallel_over_elements(begin, end, [&](kernels::CpuIsa isa, std::int64_t b, std::int64_t e) {
        kernels::fused_measure_cpu<Functor>(isa, args, b, e);
      });
      kernels::tensor_norms<Functor>(args, first, last);
      parallel_over_elements(begin, end, [&](kernels::CpuIsa isa, std::int64_t b, std::int64_t e) {
        kernels::fused_update_cpu<Functor>(isa, args.update, b, e);
      });
    });
  }

  /// Computes the norms of entire tensors from shards: see Note [Sharded parameters].
  void measure_shards(const Bucket& bucket, kernels::MeasureArgs<Functor> args) {
    workspace_.reserve_sums(bucket, Functor::kNumNorms);
    args.sums = static_cast<kernels::MeasurePartial*>(workspace_.sums().mutable_data_ptr());
    measure_all(bucket.key.device, args);
    sum_measured_over_shards(workspace_.sums(), Functor::kTracksNorm, *bucket.shard_groups);
    args.partials = std::exchange(args.sums, nullptr);
    args.chunk_offsets = workspace_.one_partial_each();
    finish_norms(bucket.key.device, args);
  }

  /// Runs both phases for all tensors.
  void measure_all(const c10::Device& device, const kernels::MeasureArgs<Functor>& args) const {
    if (device.is_cpu()) {
      parallel_over_elements(args.update.tensors.total(),
                             [&](kernels::CpuIsa isa, std::int64_t begin, std::int64_t end) {
                               kernels::fused_measure_cpu<Functor>(isa, args, begin, end);
                             });
      return finish_norms(device, args);
    }
#if defined(TORCHFUSE_WITH_CUDA)
    check_status(op(), kernels::fused_measure_cuda<Functor>(args, current_stream(device)));
#endif
  }

  void finish_norms(const c10::Device& device, const kernels::MeasureArgs<Functor>& args) const {
    if (device.is_cpu()) return kernels::tensor_norms<Functor>(args, 0, args.update.tensors.count);
#if defined(TORCHFUSE_WITH_CUDA)
    check_status(op(), kernels::tensor_norms_cuda<Functor>(args, current_stream(device)));
#endif
  }

  std::vector<typename Functor::Params> groups_;
  LayerwiseWorkspace workspace_;
  MatrixExchanges exchanges_;
  std::vector<at::Tensor> tensors_;
};

using AlgorithmFactory = std::function<std::unique_ptr<Algorithm>()>;

/// Registers an algorithm with FusedStep by name. Called once per optimizer, at load time.
bool register_algorithm(const std::string& name, AlgorithmFactory factory);
/// Creates an algorithm by name. Throws an error that lists the known names if `name` is unknown.
std::unique_ptr<Algorithm> make_algorithm(const std::string& name);

}  // namespace torchfuse::ops
