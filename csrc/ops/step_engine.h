// SPDX-License-Identifier: BSD-3-Clause
// The fused step over a list of slots: gather and check everything, then statistics, prologue and
// update. FusedStep keeps one between steps; the functional ops make one per call.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torchfuse/fused_step.h>

#include "kernels/common/step_scalars.h"
#include "kernels/prologue.h"
#include "ops/algorithm.h"
#include "ops/bucket.h"

namespace torchfuse::ops {

/// Slots that a thread takes at least in the passes over tensor objects.
constexpr std::int64_t kSlotsPerThread = 1024;

class StepEngine {
 public:
  explicit StepEngine(std::unique_ptr<Algorithm> algorithm);

  Algorithm& algorithm() { return *algorithm_; }

  /// Checks the slots and takes them as the plan; on an error the former plan stays.
  void plan(std::vector<FusedSlot> slots);
  const std::vector<FusedSlot>& slots() const { return slots_; }

  /// `grads[i]` belongs to slot i; without `grads`, each parameter's own .grad is read. A slot with
  /// an undefined gradient takes no part.
  void run(const std::vector<std::vector<HyperParam>>& groups, const FusedStepOptions& options,
           const at::TensorList* grads = nullptr);

  at::Tensor total_norm() const;
  at::Tensor skipped() const;

 private:
  /// One tensor of a slot as the last check saw it.
  struct Stream {
    c10::TensorImpl* impl = nullptr;
    const void* address = nullptr;
    caffe2::TypeMeta type;
  };

  /// A slot as the last check saw it. While the addresses stay, only the gradient needs checking.
  struct Planned {
    kernels::TensorRow row;
    BucketKey key;
    bool contiguous = false;  ///< of the parameter, and so of all its streams
    /// Parameter, states and master, which have one entry per element; then step and tensor states.
    std::int32_t num_streams = 0;
    std::int32_t num_elementwise = 0;
    Stream streams[4 + kernels::kMaxStates];

    void add(const at::Tensor& tensor);
    bool unchanged() const;
  };

  /// What the survey found of a slot's gradient.
  enum class Found : std::uint8_t { kNoGrad, kAsPlanned, kNeedsCheck };

  /// Everything of a step that lives on one device.
  struct DeviceWork {
    c10::Device device{c10::kCPU};
    std::vector<float*> steps;
    std::vector<Bucket*> buckets;  ///< those of one sharding in a row
    /// Those of all slots that take part, in order; kWhole is always there.
    std::vector<std::int32_t> shardings{BucketKey::kWhole};
    at::Tensor scalars;   ///< the bytes of a StepScalars, as four floats
    at::Tensor partials;  ///< NormPartial rows, as doubles
    at::Tensor arrivals;  ///< zeroed counter for K1's last block
    at::Tensor grad_scale;
    at::Tensor found_inf;
    std::int64_t num_partials = 0;
    bool prologue_done = false;

    kernels::StepScalars* scalars_ptr() const;
    kernels::NormPartial* partials_ptr() const;
  };

  std::int32_t sharding_of(const FusedSlot& slot);
  Planned check_slot(std::size_t index, const FusedSlot& slot);
  void check_states(std::int64_t index, const FusedSlot& slot, Planned& planned) const;
  void check_master(std::int64_t index, const FusedSlot& slot, Planned& planned) const;
  void check_rounding(std::int64_t index, const FusedSlot& slot, Planned& planned) const;
  void check_tensor_state(std::int64_t index, const FusedSlot& slot, Planned& planned) const;
  at::Tensor usable_grad(std::size_t index, const Planned& planned, const at::Tensor& grad);
  void gather(const std::vector<std::vector<HyperParam>>& groups, const at::TensorList* grads);
  const at::Tensor& grad_of(std::size_t index, const at::TensorList* grads) const;
  void fetch_ahead(std::size_t index) const;
  void survey(const at::TensorList* grads);
  void add_row(std::size_t index, const at::Tensor& grad);
  void check_options(const FusedStepOptions& options) const;
  void check_used_states(std::size_t index) const;
  DeviceWork& work_on(const c10::Device& device);
  void set_groups(const std::vector<std::vector<HyperParam>>& groups, const c10::Device& device);
  void prepare_scalars(const FusedStepOptions& options);
  kernels::PrologueArgs prologue_args(const DeviceWork& work, const FusedStepOptions& options,
                                      bool has_norm) const;
  void reduce_norms(const FusedStepOptions& options);
  at::Tensor sum_partials(const DeviceWork& work, const kernels::NormPartial* partials,
                          std::int64_t count) const;
  void share_partials();
  void run_prologues(const FusedStepOptions& options, bool has_norm);
  void update(const std::vector<std::vector<HyperParam>>& groups, const FusedStepOptions& options);
  void finish(const FusedStepOptions& options);

  std::unique_ptr<Algorithm> algorithm_;
  c10::Device groups_device_{c10::kCPU};  ///< where the algorithm's tensor hyper-parameters are
  std::vector<FusedSlot> slots_;
  std::vector<Planned> planned_;
  std::vector<std::vector<std::string>> shardings_;  ///< each a list of process groups
  Buckets buckets_;
  std::vector<DeviceWork> work_;
  std::vector<Found> found_;
  std::vector<std::size_t> active_;  ///< slots with a gradient in this step
  /// Gradients that had to be copied into another layout or dtype: (original, copy).
  std::vector<std::pair<at::Tensor, at::Tensor>> converted_;
};

}  // namespace torchfuse::ops
