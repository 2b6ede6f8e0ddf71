// SPDX-License-Identifier: BSD-3-Clause
// The fused step over a list of slots: gather and check everything, then statistics, prologue and
// update. FusedStep keeps one between steps; the functional ops make one per call.
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

/// Slots that a thread takes at least in the passes over tensor objects.
constexpr std::int64_t kSlotsPerThread = 1024;

/// A NormPartial in a tensor of doubles.
constexpr std::int64_t kPartialDoubles = sizeof(kernels::NormPartial) / sizeof(double);

/// A borrowed tensor, for calls that take tensors.
inline at::Tensor as_tensor(c10::TensorImpl* borrowed) {
  return at::Tensor(
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(borrowed));
}

/// A tensor's sizes and strides as a plan keeps them.
struct Layout {
  Layout() = default;
  explicit Layout(const at::Tensor& tensor);
  /// Whether elements of both lie at the same offsets: see same_layout().
  bool matches(const c10::TensorImpl& tensor) const;

  c10::DimVector sizes;
  c10::DimVector strides;
  bool contiguous = false;
};

/// What one tensor of a slot must be like. Its key set tells that it is strided, no subclass, not
/// negated, and on what kind of device.
struct PlannedTensor {
  PlannedTensor() = default;
  explicit PlannedTensor(const at::Tensor& tensor);
  /// Whether `tensor` is like this, besides its sizes and strides.
  [[gnu::always_inline]] bool matches(const c10::TensorImpl& tensor) const {
    return tensor.key_set() == keys && tensor.dtype() == type && tensor.device() == device;
  }
  /// Finds `numel` elements in a row, if the storage holds them.
  bool find_memory(c10::TensorImpl& tensor, std::int64_t numel, void*& address) const;

  c10::DispatchKeySet keys;
  caffe2::TypeMeta type;
  c10::Device device{c10::kCPU};
  bool exists = false;
  std::int64_t itemsize = 0;
};

/// Where and in which version a step left a parameter. The storage is held weakly: its memory goes
/// when its owners let go, but no other storage can have its address and be taken for it. `param`
/// is compared and never followed.
struct Written {
  explicit Written(const SlotTensors& tensors);
  /// Whether nobody has written to the parameter, replaced it or given it other memory since.
  bool holds(const SlotTensors& tensors) const;
  /// After another write to the same parameter in the same memory, as in nearly every step.
  void note_versions(const SlotTensors& tensors);
  bool same_memory(const SlotTensors& tensors) const;

  const c10::TensorImpl* param;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  const void* address;
  std::uint32_t version = 0;
  std::uint32_t wrapper_version = 0;
};

/// What a slot's tensors must be like for a step to take them as they are, and where the last step
/// found them. See Note [A plan holds no tensor].
struct PlannedSlot {
  kernels::TensorRow row;  ///< addresses are those of the last step's tensors
  BucketKey key;
  Layout layout;  ///< of the parameter, its states, its master and its average
  PlannedTensor param;
  PlannedTensor states[SlotTensors::kMaxStates];
  PlannedTensor master;
  PlannedTensor ema;
  PlannedTensor step;
  PlannedTensor start;
  std::uint32_t has_states = 0;  ///< bit k: there is a state k
  /// After this plan's last write to the parameter; none: there was none that can be told apart.
  std::optional<Written> written;

  /// Was not among the slots that were last compared for shared memory, or has moved since.
  bool unchecked = true;

  /// Takes the addresses of the tensors, if they are like this. Changes nothing but addresses.
  bool accept(const SlotTensors& tensors, std::size_t num_states, std::size_t num_elementwise);

 private:
  bool take_operand(const PlannedTensor& like, c10::TensorImpl* tensor, void*& address,
                    bool& moved) const;
  static bool take_number(const PlannedTensor& like, c10::TensorImpl* tensor, void*& address);
};

class StepEngine {
 public:
  /// `caller` is what the user called, where messages are to name parameters by their places among
  /// the groups; none: they name the op and the entries of its lists.
  explicit StepEngine(std::unique_ptr<Algorithm> algorithm, std::string caller = {});

  Algorithm& algorithm() { return *algorithm_; }

  /// Checks the slots and takes them as the plan; on an error the former plan stays.
  void plan(const std::vector<FusedSlot>& slots);

  /// False: the tensors are not as planned, and nothing was done.
  bool run(const std::vector<SlotTensors>& slots,
           const std::vector<std::vector<HyperParam>>& groups, const FusedStepOptions& options);

  at::Tensor total_norm() const;
  at::Tensor skipped() const;

 private:
  /// How a slot compares with the plan.
  enum class Match : std::uint8_t { kNoGrad, kAsPlanned, kOtherGrad, kNotAsPlanned };

  /// Everything of a step that lives on one device.
  struct DeviceWork {
    c10::Device device{c10::kCPU};
    std::vector<float*> steps;
    std::vector<Bucket*> buckets;  ///< those of one sharding in a row
    /// Those of all slots that take part, in order; kWhole is always there.
    std::vector<std::int32_t> shardings{BucketKey::kWhole};
    at::Tensor scalars;   ///< the bytes of a StepScalars, as four floats
    Workspace workspace;  ///< for the sums and the partials of this step's gradients
    at::Tensor shared;    ///< the sums of all devices and processes, in their place
    Arrivals arrivals;    ///< of K1's partials
    at::Tensor grad_scale;
    at::Tensor found_inf;
    at::Tensor skip_norm_above;  ///< where the step has a tensor
    std::int64_t num_sums = 0;   ///< that the prologue adds
    bool takes_part = false;     ///< has a gradient, or what other processes have is known here
    bool prologue_done = false;

    void reserve_sums();
    kernels::StepScalars* scalars_ptr() const;
    kernels::NormPartial* sums_ptr() const;
    /// A CUDA device's partials, of one bucket after the other. Those of a CPU are the sums.
    kernels::NormPartial* partials_ptr() const { return sums_ptr() + num_sums; }
  };

  /// Where the row of a slot goes.
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
  /// One tensor of a slot; kinds are those of step_engine_overlaps.cpp.
  struct Operand {
    std::size_t slot;
    int kind;
  };
  /// The memory of an operand.
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
  void follow_params();
  void note_written();
  void keep_rows();
  void prepare_scalars(const FusedStepOptions& options);
  kernels::PrologueArgs prologue_args(const DeviceWork& work, const FusedStepOptions& options,
                                      bool has_norm) const;
  void reduce_norms(const FusedStepOptions& options);
  void reduce_norm(DeviceWork& work, const Bucket& bucket, kernels::NormPartial* sums,
                   const kernels::PrologueArgs* prologue) const;
  at::Tensor sum_partials(const c10::Device& device, const kernels::NormPartial* partials,
                          std::int64_t count) const;
  std::vector<at::Tensor> sums_of_shardings() const;
  void share_partials(const FusedStepOptions& options);
  void agree_on_skip(const FusedStepOptions& options) const;
  void run_prologues(const FusedStepOptions& options, bool has_norm);
  void update(const std::vector<std::vector<HyperParam>>& groups, const FusedStepOptions& options);
  void unscale(const DeviceWork& work);
  void finish(const FusedStepOptions& options);
  at::Tensor scalar_of_last_step(std::int64_t index, double without_gradients) const;

  std::unique_ptr<Algorithm> algorithm_;
  std::string caller_;
  std::size_t num_states_;
  std::size_t num_elementwise_;           ///< of the states, those with an entry for each element
  c10::Device groups_device_{c10::kCPU};  ///< where the algorithm's tensor hyper-parameters are
  std::vector<PlannedSlot> planned_;
  bool has_masters_ = false;                         ///< in fp32, of any slot
  bool apart_ = false;                               ///< no two tensors of this step share memory
  std::vector<Span> spans_;                          ///< sorted, of parameters and their states
  std::vector<std::int64_t> positions_;              ///< of the slots in their groups
  std::vector<std::vector<std::string>> shardings_;  ///< each a list of process groups
  Buckets buckets_;
  std::vector<DeviceWork> work_;

  // Of the last step.
  bool ran_ = false;
  bool measured_ = false;               ///< whether it clipped or checked
  std::optional<c10::Device> results_;  ///< where its scalars are; none: no slot had a gradient

  // For the time of a step.
  const std::vector<SlotTensors>* slots_ = nullptr;
  std::vector<Match> matches_;
  std::vector<std::uint32_t> used_states_;  ///< for each group: bit k, if it uses state k
  std::vector<std::size_t> active_;
  std::vector<std::pair<at::Tensor, at::Tensor>> converted_;  ///< gradients and their stand-ins
};

}  // namespace torchfuse::ops
