// SPDX-License-Identifier: BSD-3-Clause
// The fused step over a list of slots: gathers and checks all tensors, and then runs statistics,
// prologue and update. FusedStep keeps an engine between steps; the functional ops create one per
// call.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torchfuse/fused_step.h>

#include "kernels/common/step_scalars.h"
#include "kernels/prologue.h"
#include "ops/bucket.h"
#include "ops/fused_step/algorithm.h"
#include "ops/fused_step/workspace.h"
#include "ops/launch/arrivals.h"

namespace torchfuse::ops {

/// Minimum number of slots per thread in the passes over tensor objects.
constexpr std::int64_t kSlotsPerThread = 1024;

/// Doubles per NormPartial.
constexpr std::int64_t kPartialDoubles = sizeof(kernels::NormPartial) / sizeof(double);

/// Returns a borrowed tensor as an at::Tensor.
inline at::Tensor as_tensor(c10::TensorImpl* borrowed) {
  return at::Tensor(
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(borrowed));
}

/// A tensor's sizes and strides as a plan stores them.
struct Layout {
  Layout() = default;
  explicit Layout(const at::Tensor& tensor);
  /// Returns whether both layouts put equal elements at equal offsets: see same_layout().
  bool matches(const c10::TensorImpl& tensor) const;

  c10::DimVector sizes;
  c10::DimVector strides;
  bool contiguous = false;
};

/// The properties that one tensor of a slot must have. The key set tells that the tensor is
/// strided, not a subclass and not negated, and on which kind of device.
struct PlannedTensor {
  PlannedTensor() = default;
  explicit PlannedTensor(const at::Tensor& tensor);
  /// Returns whether `tensor` has these properties. Does not compare sizes and strides.
  [[gnu::always_inline]] bool matches(const c10::TensorImpl& tensor) const {
    return tensor.key_set() == keys && tensor.dtype() == type && tensor.device() == device;
  }
  /// Stores the address of `numel` consecutive elements in `address`. Returns false if the storage
  /// does not contain all of them.
  bool find_memory(c10::TensorImpl& tensor, std::int64_t numel, void*& address) const;

  c10::DispatchKeySet keys;
  caffe2::TypeMeta type;
  c10::Device device{c10::kCPU};
  bool exists = false;
  std::int64_t itemsize = 0;
};

/// Where and in which version a step left a parameter. The reference to the storage is weak: the
/// owners can free the memory, but no other storage can get the same address and be mistaken for
/// this storage. `param` is compared and never dereferenced.
struct Written {
  explicit Written(const SlotTensors& tensors);
  /// Returns whether the parameter has not been written to, replaced or given other memory since.
  bool holds(const SlotTensors& tensors) const;
  /// Records another write to the same parameter in the same memory, as in nearly every step.
  void note_versions(const SlotTensors& tensors);
  bool same_memory(const SlotTensors& tensors) const;

  const c10::TensorImpl* param;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  const void* address;
  std::uint32_t version = 0;
  std::uint32_t wrapper_version = 0;
};

/// The properties that a slot's tensors must have for a step to use the plan, and where the last
/// step found the tensors. See Note [A plan holds no tensor].
struct PlannedSlot {
  /// A sharded matrix as a whole.
  struct Whole {
    Layout layout;
    std::int64_t name_checksum = 0;
  };

  kernels::TensorRow row;  ///< contains the addresses of the last step's tensors
  BucketKey key;
  Layout layout;                 ///< shared by parameter, states, master and average
  std::unique_ptr<Whole> whole;  ///< null: not a sharded matrix
  PlannedTensor param;
  PlannedTensor states[SlotTensors::kMaxStates];
  PlannedTensor master;
  PlannedTensor ema;
  PlannedTensor step;
  PlannedTensor start;
  std::uint32_t has_states = 0;  ///< bit k is set if state k exists
  std::size_t first_alike = 0;   ///< first of consecutive slots of a group with equal keys
  /// State after this plan's last write to the parameter. nullopt: no write was recorded.
  std::optional<Written> written;

  /// Whether the slot was missing from the last comparison for shared memory, or has moved since.
  bool unchecked = true;

  /// Stores the tensors' addresses and returns true if the tensors match the plan. Changes nothing
  /// but addresses.
  bool accept(const SlotTensors& tensors, std::size_t num_states, std::size_t num_elementwise);

  /// Returns the layout of the parameter as a whole.
  const Layout& whole_layout() const { return whole == nullptr ? layout : whole->layout; }

 private:
  bool take_operand(const PlannedTensor& like, c10::TensorImpl* tensor, void*& address,
                    bool& moved) const;
  static bool take_number(const PlannedTensor& like, c10::TensorImpl* tensor, void*& address);
};

class StepEngine {
 public:
  /// If `caller`, the function that the user called, is not empty, messages name parameters by
  /// group and index. Otherwise messages name the op and the entries of its lists.
  explicit StepEngine(std::unique_ptr<Algorithm> algorithm, std::string caller = {});

  Algorithm& algorithm() { return *algorithm_; }

  /// Checks the slots and makes them the plan. On an error, the former plan stays.
  void plan(const std::vector<FusedSlot>& slots);

  /// Returns false, and does nothing, if the tensors do not match the plan.
  bool run(const std::vector<SlotTensors>& slots,
           const std::vector<std::vector<HyperParam>>& groups, const FusedStepOptions& options);

  at::Tensor total_norm() const;
  at::Tensor skipped() const;

 private:
  /// Result of comparing a slot with the plan.
  enum class Match : std::uint8_t { kNoGrad, kAsPlanned, kOtherGrad, kNotAsPlanned };

  /// Which gradients a norm includes. With clip_apart, each norm has scalars, and all scalars have
  /// the decision to skip in common.
  enum class Norm : std::uint8_t { kAll, kOthers, kApart };
  static constexpr std::int64_t kNumScalars = 3;

  /// All of a step's data on one device.
  struct DeviceWork {
    c10::Device device{c10::kCPU};
    std::vector<float*> steps;
    std::vector<Bucket*> buckets;  ///< sorted by key
    /// Shardings of all slots that take part, in order. kWhole is always included.
    std::vector<std::int32_t> shardings{BucketKey::kWhole};
    at::Tensor scalars;   ///< kNumScalars StepScalars as floats
    Workspace workspace;  ///< sums and partials of this step's gradients
    at::Tensor shared;    ///< replaces the sums: those from all devices and processes
    Arrivals arrivals;    ///< arrival counters for K1's partials
    at::Tensor grad_scale;
    at::Tensor found_inf;
    at::Tensor skip_norm_above;  ///< defined if the threshold is a tensor
    std::int64_t num_sums = 0;   ///< number of sums that the prologue adds
    std::int64_t num_apart = 0;  ///< how many of them, the last ones, have a norm of their own
    bool takes_part = false;     ///< has a gradient, or receives other processes' results
    bool prologue_done = false;

    void reserve_sums();
    kernels::StepScalars* scalars_ptr(Norm norm) const;
    kernels::NormPartial* sums_ptr() const;
    /// A CUDA device's partials, reused by every bucket in turn. On a CPU, the sums are the
    /// partials.
    kernels::NormPartial* partials_ptr() const { return sums_ptr() + num_sums; }
  };

  /// Destination of a slot's row.
  struct Target {
    DeviceWork* work = nullptr;
    Bucket* bucket = nullptr;
  };

  bool writes_flag(const at::Tensor& found_inf) const;

  // The plan.
  const char* caller() const;
  Argument argument(const char* list, const char* key, std::size_t index,
                    const FusedSlot& slot) const;
  Argument argument(const char* list, const char* key, std::size_t index) const;
  std::int32_t sharding_of(const FusedSlot& slot);
  PlannedSlot check_slot(std::size_t index, const FusedSlot& slot);
  void check_states(std::size_t index, const FusedSlot& slot, PlannedSlot& planned) const;
  void check_master(std::size_t index, const FusedSlot& slot, PlannedSlot& planned) const;
  void check_ema(std::size_t index, const FusedSlot& slot, PlannedSlot& planned) const;
  void check_rounding(std::size_t index, const FusedSlot& slot, PlannedSlot& planned) const;
  void check_tensor_state(std::size_t index, const FusedSlot& slot, PlannedSlot& planned) const;

  // The step's tensors.
  void fetch_ahead(std::size_t index) const;
  Match match_slot(std::size_t index);
  void match_slots();
  /// One tensor of a slot. step_engine_overlaps.cpp defines the kinds.
  struct Operand {
    std::size_t slot;
    int kind;
  };
  /// An operand's memory.
  struct Span {
    const char* begin;
    const char* end;
    Operand operand;
  };
  static void add_span(std::vector<Span>& spans, const void* memory, const c10::TensorImpl* tensor,
                       Operand operand);
  void sort_apart(std::vector<Span>& spans) const;
  std::string operand_name(std::size_t index, int kind) const;
  void check_overlaps();
  void check_written_grads() const;
  [[noreturn]] void fail_overlap(Operand a, Operand b) const;
  at::Tensor usable_grad(std::size_t index, bool write_back);
  void check_used_states(std::size_t index) const;
  void check_used_ema(std::size_t index) const;
  Target target_of(const BucketKey& key);
  void add_row(std::size_t index, const FusedStepOptions& options, const PlannedSlot*& like,
               Target& target);
  bool gather(const std::vector<std::vector<HyperParam>>& groups, const FusedStepOptions& options);
  DeviceWork& work_on(const c10::Device& device);

  // The step.
  void check_options(const FusedStepOptions& options) const;
  void check_capture(const std::vector<std::vector<HyperParam>>& groups) const;
  void set_groups(const std::vector<std::vector<HyperParam>>& groups, const c10::Device& device);
  void plan_exchanges();
  void follow_params();
  void note_written();
  void keep_rows();
  void prepare_scalars(const FusedStepOptions& options);
  kernels::PrologueArgs prologue_args(const DeviceWork& work, const FusedStepOptions& options,
                                      bool has_norm) const;
  kernels::PrologueArgs clip_args(const DeviceWork& work, const FusedStepOptions& options,
                                  Norm norm) const;
  void reduce_norms(const FusedStepOptions& options);
  void reduce_norm(DeviceWork& work, const Bucket& bucket, kernels::NormPartial* sums,
                   const kernels::PrologueArgs* prologue) const;
  at::Tensor sum_partials(const c10::Device& device, const kernels::NormPartial* partials,
                          std::int64_t count) const;
  std::vector<at::Tensor> sums_of_shardings(bool apart) const;
  void share_partials(const FusedStepOptions& options);
  void agree_on_skip(const FusedStepOptions& options) const;
  void run_prologue(const DeviceWork& work, const kernels::PrologueArgs& args) const;
  void run_prologues(const FusedStepOptions& options, bool has_norm);
  void update(const std::vector<std::vector<HyperParam>>& groups, const FusedStepOptions& options);
  void unscale(const DeviceWork& work);
  void finish(const FusedStepOptions& options);
  at::Tensor scalar_of_last_step(std::int64_t index, double without_gradients) const;

  std::unique_ptr<Algorithm> algorithm_;
  std::string caller_;
  std::size_t num_states_;
  std::size_t num_elementwise_;           ///< number of states with one entry per element
  bool has_layouts_;                      ///< whether the algorithm needs the parameters' layouts
  c10::Device groups_device_{c10::kCPU};  ///< where the algorithm's tensor hyper-parameters are
  std::vector<PlannedSlot> planned_;
  bool has_masters_ = false;             ///< whether a slot has an fp32 master
  bool apart_ = false;                   ///< whether no two tensors share memory in this step
  std::vector<Span> spans_;              ///< sorted memory of parameters and states
  std::vector<std::int64_t> positions_;  ///< the slots' positions in their groups
  /// How a parameter is sharded: see FusedSlot.
  struct Sharding {
    std::vector<std::string> groups;
    std::string exchange_group;
    bool operator==(const Sharding&) const = default;
  };
  std::vector<Sharding> shardings_;
  Buckets buckets_;
  std::vector<DeviceWork> work_;

  // Results of the last step.
  bool ran_ = false;
  bool measured_ = false;               ///< whether the step clipped or checked
  std::optional<c10::Device> results_;  ///< the scalars' device; nullopt: no slot had a gradient

  // Valid only during a step.
  const std::vector<SlotTensors>* slots_ = nullptr;
  std::vector<Match> matches_;
  const PlannedSlot* sized_ = nullptr;      ///< the last slot whose sizes were checked
  std::vector<std::uint32_t> used_states_;  ///< per group: bit k is set if state k is used
  std::vector<std::size_t> active_;
  std::vector<std::pair<at::Tensor, at::Tensor>> converted_;  ///< gradients and copies
};

}  // namespace torchfuse::ops
