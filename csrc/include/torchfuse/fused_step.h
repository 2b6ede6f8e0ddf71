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
#include <torchfuse/write_back_grads.h>

namespace torchfuse {

/// Where the elements of a part lie among those of the whole parameter, in the order of its memory:
/// in runs at equal distances. Part element i is element `first + i / run * stride + i % run`.
struct ElementNumbers {
  std::int64_t first = 0;   ///< number of the part's first element
  std::int64_t run = 0;     ///< elements of a run; 0: the part is one run
  std::int64_t stride = 0;  ///< from the first element of a run to that of the next
};

/// One parameter with its optimizer state, from which FusedStep makes its plan.
struct FusedSlot {
  at::Tensor param;  ///< fp32, fp16, bf16 or fp64; dense, any strides
  /// One tensor per state of the algorithm, in its order (Adam: exp_avg, exp_avg_sq,
  /// max_exp_avg_sq); undefined if the hyper-parameters do not use the state. Each fp32, bf16 or
  /// fp16 (fp64 for fp64 parameters), with the sizes and strides of `param`. Tensor states come
  /// last: one number per tensor, 0-dim, fp64 for an fp64 parameter and fp32 otherwise.
  std::vector<at::Tensor> states;
  /// fp32 master of an fp16 or bf16 parameter, or the int16 remainder that replaces the master of a
  /// bf16 parameter: see master_of_remainder(). Undefined: none.
  at::Tensor master;
  /// Average of the parameter, which steps with FusedStepOptions::ema move: fp64 for an fp64
  /// parameter and fp32 otherwise, with the sizes and strides of `param`. Undefined: none.
  at::Tensor ema;
  at::Tensor step;  ///< step count, 0-dim fp32, on the parameter's device
  /// SGD: what `step` was when the momentum buffer was made, likewise. The buffer's first update is
  /// the step after it that is not skipped. Undefined: 0. Other algorithms do not read it.
  at::Tensor start;
  std::int64_t group = 0;  ///< index into the hyper-parameters given to step()
  /// Index of the parameter in its group; error messages name group and position.
  std::int64_t position = 0;
  /// Round the parameter (bf16, without a master) stochastically, without bias. The random bits
  /// depend on the step's seed, the parameter's `index`, its step count, and the element's number.
  bool stochastic_rounding = false;
  std::int64_t index = 0;  ///< number of the parameter, unique and the same in every run
  /// Names of the process groups (c10d's) over whose processes the parameter is split: `param`, its
  /// states and its master are this process's part. Norms of whole tensors and of all gradients are
  /// summed over these groups; all processes must step the same parameters in the same order.
  std::vector<std::string> shard_groups;
  /// The numbers of this part's elements, for stochastic rounding: the same draws however it is
  /// split. The default is that of whole parameters.
  ElementNumbers numbers;
};

/// Borrowed pointers to the tensors of one slot, for one step. Null: there is no such tensor.
struct SlotTensors {
  static constexpr std::size_t kMaxStates = 4;  ///< maximum number of states of an algorithm

  c10::TensorImpl* param = nullptr;          ///< the parameter
  c10::TensorImpl* grad = nullptr;           ///< its gradient; null: the step ignores the slot
  c10::TensorImpl* states[kMaxStates] = {};  ///< in the order of FusedSlot::states
  c10::TensorImpl* master = nullptr;         ///< as in FusedSlot::master
  c10::TensorImpl* ema = nullptr;            ///< as in FusedSlot::ema
  c10::TensorImpl* step = nullptr;           ///< as in FusedSlot::step
  c10::TensorImpl* start = nullptr;          ///< as in FusedSlot::start
  /// The tensor whose local part is `param`, if any: a write to either counts as a write to both.
  c10::TensorImpl* wrapper = nullptr;
};

/// Returns pointers to the slot's tensors and to its parameter's .grad, valid while these exist.
TORCHFUSE_API SlotTensors borrow(const FusedSlot& slot);

/// An exponential moving average of the parameters, moved as the step writes them:
///
///     ema = decay * ema + (1 - decay) * param
///
/// `param` is the new value before it is rounded to a 16-bit parameter: the master's, if there is
/// one. Until a parameter's step count has passed `start_step` the average is a copy of it. With n
/// counting the steps after that, `warmup` limits the decay to (1 + n) / (10 + n). A skipped step
/// leaves the average as it was, and so does one in which the parameter has no gradient.
struct EmaOptions {
  double decay = 0.999;         ///< in [0, 1)
  bool warmup = false;          ///< begin with a smaller decay
  std::int64_t start_step = 0;  ///< at least 0
};

/// What one step() does besides the update.
struct FusedStepOptions {
  /// Loss scale of the gradients (1 element, fp32): they are multiplied by its reciprocal. None: 1.
  std::optional<at::Tensor> grad_scale;
  /// 1-element fp32 flag: non-zero skips the step on the device, without the host reading it.
  std::optional<at::Tensor> found_inf;
  /// Check all gradients inside the step; a non-finite element skips the step and sets `found_inf`,
  /// if given.
  bool check_inside = false;
  /// With `check_inside`: `found_inf` becomes 1 or 0 whatever it was, and need not be cleared.
  bool found_inf_is_output = false;
  /// Clip the global L2 norm of the unscaled gradients, over all groups and devices. None: do not.
  std::optional<double> max_grad_norm;
  /// Skip the step where this norm is greater: a number of at least 0, or a 1-element tensor of
  /// fp32 or fp64, which the device reads. It is no overflow: `found_inf` stays. A NaN norm skips
  /// nothing. None: do not.
  std::optional<HyperParam> skip_norm_above;
  /// What to store in .grad; by default gradients are never modified.
  WriteBackGrads write_back_grads = WriteBackGrads::kNothing;
  /// Seed of stochastic rounding, at least 0.
  std::int64_t seed = 0;
  /// On CUDA devices the update walks from the last parameter to the first. What the pass before it
  /// read last may still lie in the device's caches. The results are the same bits.
  bool update_from_the_end = false;
  /// Names of process groups whose processes step other parameters of one model, as the stages of a
  /// pipeline do: the norm of all gradients, and what `found_inf` or a check says, are those of all
  /// these processes, in the same order on all. Every process takes part in one small reduction
  /// over each group where a step clips or checks, and in one where it obeys `found_inf`, with
  /// gradients or without.
  std::vector<std::string> norm_groups;
  /// Device of the tensor that is reduced: one of this process's parameters.
  c10::Device norm_device{c10::kCPU};
  /// Move the slots' averages; every slot with a gradient must have one. None: averages stay.
  std::optional<EmaOptions> ema;

  /// Whether the step stores gradients: not where there is no scale to take off and no norm to clip
  /// to.
  TORCHFUSE_API bool writes_grads() const;
};

/// The native step of one optimizer: launch plan, workspaces, and the two passes of the fused step
/// (norm and check, then update). Each Python or C++ optimizer holds one.
///
/// The plan describes the tensors of each slot: dtypes, device, sizes and strides. It holds no
/// tensor. Owners pass their tensors to every step, which compares them with the plan and takes
/// their addresses, so that `p.data = ...`, replaced states and replaced gradients are noticed, and
/// tensors that their owner drops are freed immediately. Between steps only workspaces are kept: at
/// most 88 bytes for each chunk of up to 16,384 gradient elements, on each device.
///
/// Only one thread at a time may use an object.
class TORCHFUSE_API FusedStep {
 public:
  /// `algorithm` is the name of a registered update, such as "adam"; throws for any other name.
  /// `caller` is the function that the user calls; error messages begin with it.
  explicit FusedStep(const std::string& algorithm, std::string caller = "FusedStep::step");
  ~FusedStep();
  /// Movable, not copyable.
  FusedStep(FusedStep&&) noexcept;
  /// Movable, not copyable.
  FusedStep& operator=(FusedStep&&) noexcept;

  /// Returns the algorithm's hyper-parameters, in the order in which step() expects their values.
  const std::vector<HyperParamInfo>& hyper_params() const;
  /// Returns the names of the algorithm's states, in the order of FusedSlot::states.
  const std::vector<std::string>& state_names() const;
  /// Returns how many of the last states are tensor states, with one number per tensor.
  std::size_t num_tensor_states() const;

  /// Replaces the plan. Checks every slot; on an error the old plan stays. A state or master with
  /// the sizes of its parameter but other strides gets the parameter's strides, in place: the same
  /// tensor object, with the same values, in new memory.
  void plan(const std::vector<FusedSlot>& slots);
  bool planned() const;  ///< whether there is a plan
  void reset();          ///< removes the plan

  /// Steps all slots that have a gradient. Every check is made before anything is written.
  ///
  /// @param slots tensors of the plan's slots, in its order. They must live until this returns.
  /// @param groups `groups[slot.group]` holds the values of hyper_params().
  /// @param options see FusedStepOptions.
  /// @return false if tensors are not as planned: nothing was done, and plan() must be called.
  /// @throws c10::Error for invalid gradients, hyper-parameters or options.
  [[nodiscard]] bool step(const std::vector<SlotTensors>& slots,
                          const std::vector<std::vector<HyperParam>>& groups,
                          const FusedStepOptions& options = {});
  /// Steps slots that the caller keeps, with the gradients of their parameters. Calls plan() if
  /// tensors are not as planned.
  void step(const std::vector<FusedSlot>& slots, const std::vector<std::vector<HyperParam>>& groups,
            const FusedStepOptions& options = {});

  /// Returns the L2 norm of the last step's unscaled gradients (0-dim fp32, on the device): NaN if
  /// the step neither clipped nor checked, else 0 without gradients. Undefined before a step.
  at::Tensor total_norm() const;
  /// Returns 1 if the last step was skipped, else 0 (0-dim fp32, on the device). Undefined before
  /// the first step.
  at::Tensor skipped() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace torchfuse
