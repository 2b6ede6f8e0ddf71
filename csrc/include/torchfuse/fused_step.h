// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torchfuse/export.h>
#include <torchfuse/hyper_params.h>

namespace torchfuse {

/// One parameter with its optimizer state, as a plan is made from it.
struct FusedSlot {
  at::Tensor param;  ///< fp32, fp16, bf16 or fp64; dense, any strides
  /// One tensor per state of the algorithm, in its order (Adam: exp_avg, exp_avg_sq,
  /// max_exp_avg_sq); undefined where the hyper-parameters leave a state unused. Each fp32, bf16 or
  /// fp16 (fp64 for fp64 parameters); same sizes and strides as `param`. The algorithm's tensor
  /// states come last and are 0-dim, fp64 for an fp64 parameter and fp32 otherwise.
  std::vector<at::Tensor> states;
  /// fp32 master of an fp16 or bf16 parameter; or what a bf16 parameter lacks of it, an int16
  /// remainder: see master_of_remainder(). Undefined: none.
  at::Tensor master;
  at::Tensor step;         ///< 0-dim fp32, on the parameter's device
  std::int64_t group = 0;  ///< index into the hyper-parameters given to step()
  /// Place of the parameter in its group; error messages name both.
  std::int64_t position = 0;
  /// Round the parameter (bf16, without a master) at random, without bias: by the step's seed, the
  /// parameter's `index`, its step count, and the element's place in memory.
  bool stochastic_rounding = false;
  std::int64_t index = 0;  ///< a number of the parameter's own, the same in every run
  /// Names of the process groups (c10d's) over whose processes the parameter is split: `param`, its
  /// states and its master are this process's part. The norms of whole tensors and of all gradients
  /// are summed over them; all their processes must step the same parameters in the same order.
  std::vector<std::string> shard_groups;
};

/// The tensors of one slot as a step borrows them from their owners. Null: there is none.
struct SlotTensors {
  static constexpr std::size_t kMaxStates = 4;  ///< states of an algorithm, at most

  c10::TensorImpl* param = nullptr;          ///< the parameter
  c10::TensorImpl* grad = nullptr;           ///< null: the slot takes no part in the step
  c10::TensorImpl* states[kMaxStates] = {};  ///< in the order of FusedSlot::states
  c10::TensorImpl* master = nullptr;         ///< as FusedSlot::master
  c10::TensorImpl* step = nullptr;           ///< as FusedSlot::step
  /// The tensor whose local part `param` is, if it is one: writes to either count for both.
  c10::TensorImpl* wrapper = nullptr;
};

/// The slot's tensors and its parameter's .grad, for as long as `slot` and that gradient live.
TORCHFUSE_API SlotTensors borrow(const FusedSlot& slot);

/// What one step() is asked to do besides the update.
struct FusedStepOptions {
  /// Loss scale that the gradients carry (1 element, fp32). They are multiplied by its reciprocal.
  std::optional<at::Tensor> grad_scale;
  /// 1-element fp32 flag: non-zero skips the step on the device, without the host reading it.
  std::optional<at::Tensor> found_inf;
  /// Check all gradients inside the step; a non-finite element skips it and sets `found_inf`, if
  /// given.
  bool check_inside = false;
  /// Clip the global norm of the unscaled gradients, over all groups and devices.
  std::optional<double> max_grad_norm;
  /// Store the unscaled and clipped gradients in .grad; otherwise gradients are never modified.
  bool write_back_grads = false;
  /// Of the random bits of stochastic rounding, at least 0.
  std::int64_t seed = 0;
};

/// The native step of one optimizer: launch plan, workspaces, and the two passes of the fused step
/// (norm and check, then update). Python and C++ optimizer classes each hold one.
///
/// The plan says what the tensors of each slot are like: dtypes, device, sizes and strides. It
/// holds no tensor. Every step is given the tensors by those who own them, compares them with the
/// plan and takes their addresses, so that `p.data = ...`, replaced states and replaced gradients
/// are seen, and whatever the owner lets go is free at once. Between steps only workspaces are
/// kept: 64 bytes for 16,384 gradient elements at most, once for each device.
///
/// One object is for one thread at a time.
class TORCHFUSE_API FusedStep {
 public:
  /// `algorithm` is an update registered in ops, such as "adam"; throws on any other name. `caller`
  /// is what the user calls: error messages begin with it.
  explicit FusedStep(const std::string& algorithm, std::string caller = "FusedStep::step");
  ~FusedStep();
  /// Movable, not copyable.
  FusedStep(FusedStep&&) noexcept;
  /// Movable, not copyable.
  FusedStep& operator=(FusedStep&&) noexcept;

  /// The algorithm's hyper-parameters, in the order in which step() expects their values.
  const std::vector<HyperParamInfo>& hyper_params() const;
  /// Names of the algorithm's states, in the order of FusedSlot::states.
  const std::vector<std::string>& state_names() const;
  /// How many of the last state names are one number for the whole tensor.
  std::size_t num_tensor_states() const;

  /// Replaces the plan. Checks every slot; on an error the former plan stays. A state or master
  /// with the sizes of its parameter and other strides is laid out like it, in place: the same
  /// tensor object, with the same values, in new memory.
  void plan(const std::vector<FusedSlot>& slots);
  bool planned() const;  ///< whether there is a plan
  void reset();          ///< forgets the plan

  /// One step over all slots that have a gradient. Every check is made before anything is written.
  ///
  /// @param slots the tensors of the plan's slots, in its order. They must live until this returns.
  /// @param groups `groups[slot.group]` holds the values of hyper_params().
  /// @param options what else is to be done.
  /// @return false if tensors are not as planned: nothing was done, and plan() is to be called.
  /// @throws c10::Error for gradients, hyper-parameters and options that no step can be taken with.
  [[nodiscard]] bool step(const std::vector<SlotTensors>& slots,
                          const std::vector<std::vector<HyperParam>>& groups,
                          const FusedStepOptions& options = {});
  /// The same for slots that the caller keeps, with the gradients of their parameters. Plans again
  /// where tensors are not as planned.
  void step(const std::vector<FusedSlot>& slots, const std::vector<std::vector<HyperParam>>& groups,
            const FusedStepOptions& options = {});

  /// L2 norm of the unscaled gradients of the last step, if it clipped or checked, else NaN: a
  /// 0-dim fp32 tensor on the device. 0 if no slot had a gradient. Undefined before the first step.
  at::Tensor total_norm() const;
  /// 1 if the last step was skipped, else 0: a 0-dim fp32 tensor on the device. Undefined before
  /// the first step.
  at::Tensor skipped() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace torchfuse
