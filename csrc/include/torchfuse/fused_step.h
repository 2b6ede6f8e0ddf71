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

/// Maps a shard's elements to element numbers in the whole parameter, in memory order: runs at a
/// constant stride. Shard element i has the number `first + i / run * stride + i % run`.
struct ElementNumbers {
  std::int64_t first = 0;   ///< number of the shard's first element
  std::int64_t run = 0;     ///< elements per run; 0: the shard is one run
  std::int64_t stride = 0;  ///< distance between the first elements of consecutive runs
};

/// A parameter with optimizer state, input to FusedStep::plan().
struct FusedSlot {
  at::Tensor param;  ///< fp32, fp16, bf16 or fp64; dense, any strides
  /// One tensor per algorithm state, in state_names() order (Adam: exp_avg, exp_avg_sq,
  /// max_exp_avg_sq); undefined if the hyper-parameters do not use the state. Each is fp32, bf16 or
  /// fp16 (fp64 for fp64 parameters), with the sizes and strides of `param`. Tensor states come
  /// last: one number per tensor, 0-dim, fp64 for an fp64 parameter and fp32 otherwise.
  std::vector<at::Tensor> states;
  /// fp32 master of an fp16 or bf16 parameter, or the int16 remainder that replaces a bf16
  /// parameter's master: see master_of_remainder(). Undefined: no master.
  at::Tensor master;
  /// Moving average of the parameter, updated by steps with FusedStepOptions::ema. fp64 for an fp64
  /// parameter, otherwise fp32; same sizes and strides as `param`. Undefined: no average.
  at::Tensor ema;
  at::Tensor step;  ///< step count, 0-dim fp32, on the parameter's device
  /// SGD: value of `step` when the momentum buffer was created, 0-dim fp32, on the parameter's
  /// device. The next step that is not skipped initializes the buffer. Undefined: 0. Other
  /// algorithms do not read it.
  at::Tensor start;
  std::int64_t group = 0;  ///< index into the hyper-parameters given to step()
  /// Index of the parameter in its group. Error messages name group and position.
  std::int64_t position = 0;
  /// Round the parameter (bf16, without a master) stochastically, without bias. The random bits
  /// depend on the step's seed, the parameter's `index` and step count, and the element's number.
  bool stochastic_rounding = false;
  std::int64_t index = 0;  ///< number of the parameter, unique and equal in every run
  /// Names of the process groups (c10d's) over which the parameter is sharded: `param`, states and
  /// master are this process's shards. Norms are summed over these groups. All processes must step
  /// the same parameters in the same order.
  std::vector<std::string> shard_groups;
  /// Element numbers in the whole parameter, for stochastic rounding, whose random bits then do not
  /// depend on the sharding, and for Muon's matrices. The default is for unsharded parameters.
  ElementNumbers numbers;
  /// Muon: sizes of a sharded parameter as a whole; empty for other parameters.
  std::vector<std::int64_t> whole_sizes;
  /// Muon: strides of a sharded parameter as a whole, in whose order elements are numbered. Empty:
  /// row-major.
  std::vector<std::int64_t> whole_strides;
  /// Muon: name of the process group, with every process that has a shard, over which a sharded
  /// parameter's matrices are exchanged.
  std::string exchange_group;
  /// Muon: checksum of the parameter's name, by which processes that exchange matrices notice that
  /// they list matrices of one shape in different orders. 0: unknown.
  std::int64_t name_checksum = 0;
};

/// Borrowed pointers to a slot's tensors, valid for a single step. Null: no such tensor.
struct SlotTensors {
  static constexpr std::size_t kMaxStates = 4;  ///< maximum number of states of an algorithm

  c10::TensorImpl* param = nullptr;          ///< the parameter
  c10::TensorImpl* grad = nullptr;           ///< gradient; null: the step ignores the slot
  c10::TensorImpl* states[kMaxStates] = {};  ///< in the order of FusedSlot::states
  c10::TensorImpl* master = nullptr;         ///< as in FusedSlot::master
  c10::TensorImpl* ema = nullptr;            ///< as in FusedSlot::ema
  c10::TensorImpl* step = nullptr;           ///< as in FusedSlot::step
  c10::TensorImpl* start = nullptr;          ///< as in FusedSlot::start
  /// Tensor whose local shard is `param` (a DTensor), if any: a write to either is a write to both.
  c10::TensorImpl* wrapper = nullptr;
};

/// Returns pointers to the slot's tensors and to the parameter's .grad, valid while the tensors
/// exist.
TORCHFUSE_API SlotTensors borrow(const FusedSlot& slot);

/// Exponential moving average of the parameters, updated inside the step:
///
///     ema = decay * ema + (1 - decay) * param
///
/// `param` is the new value before rounding to a 16-bit parameter: the master's value, if there is
/// a master. Until a parameter's step count exceeds `start_step`, the average is a copy of the
/// parameter. With n counting the steps after `start_step`, `warmup` limits the decay to (1 + n) /
/// (10 + n). The average does not change in a skipped step, nor in a step without a gradient for
/// the parameter.
struct EmaOptions {
  double decay = 0.999;         ///< in [0, 1)
  bool warmup = false;          ///< begin with a smaller decay
  std::int64_t start_step = 0;  ///< at least 0
};

/// Options for a step() besides the hyper-parameters.
struct FusedStepOptions {
  /// Loss scale (1 element, fp32): gradients are multiplied by its reciprocal. `nullopt` means 1.
  std::optional<at::Tensor> grad_scale;
  /// 1-element fp32 flag. If non-zero, the device skips the step; the host does not read the flag.
  std::optional<at::Tensor> found_inf;
  /// Check all gradients inside the step. A non-finite element skips the step and sets `found_inf`,
  /// if given.
  bool check_inside = false;
  /// With `check_inside`: write 1 or 0 to `found_inf` without reading the old value, so the caller
  /// need not clear the flag.
  bool found_inf_is_output = false;
  /// Maximum L2 norm of the unscaled gradients, over all groups and devices. `nullopt` means no
  /// clipping.
  std::optional<double> max_grad_norm;
  /// One entry per group, or none: all groups share one norm. Groups with true share a norm, and
  /// all other groups share another, also those of other processes. `max_grad_norm` limits each of
  /// these norms. The reported norm and `skip_norm_above` use all gradients.
  std::vector<bool> clip_apart;
  /// Skip the step if the gradient norm is greater: a number of at least 0, or a 1-element tensor
  /// in fp32 or fp64, which the device reads. Such a skip is no overflow: `found_inf` does not
  /// change. A NaN norm skips nothing. `nullopt` means no limit.
  std::optional<HyperParam> skip_norm_above;
  /// Values to store in .grad. By default gradients are never modified.
  WriteBackGrads write_back_grads = WriteBackGrads::kNothing;
  /// Seed of stochastic rounding, at least 0.
  std::int64_t seed = 0;
  /// On CUDA devices, update parameters from last to first, because the device's caches may still
  /// contain the data that the previous pass read last. Results are bit-identical.
  bool update_from_the_end = false;
  /// Names of process groups whose processes step other parameters in the same model, such as
  /// pipeline stages. The global gradient norm, `found_inf` and the check's result are combined
  /// over all these processes. All processes must list the groups in the same order. Each group
  /// costs a small reduction in steps that clip or check, and another in steps that read
  /// `found_inf`. Every process takes part, with or without gradients.
  std::vector<std::string> norm_groups;
  /// Device for the reduction over `norm_groups`: the device of any parameter on this process.
  c10::Device norm_device{c10::kCPU};
  /// Update the slots' averages; every slot with a gradient must have an average. `nullopt` means
  /// that averages do not change.
  std::optional<EmaOptions> ema;

  /// Returns whether the step stores gradients. False if there is no scale to remove and no norm to
  /// clip to.
  TORCHFUSE_API bool writes_grads() const;
  /// Returns whether two norms are clipped.
  TORCHFUSE_API bool clips_apart() const;
};

/// An optimizer's native step: launch plan, workspaces, and the fused step's two passes (norm and
/// check, then update). Each Python or C++ optimizer owns a FusedStep.
///
///     torchfuse::FusedStep step("adam");
///     step.step(slots, {values});  // values in the order of step.hyper_params()
///
/// The plan describes each slot's tensors: dtypes, device, sizes and strides. The plan keeps no
/// tensor. Owners pass all tensors to every step, which compares the tensors with the plan and
/// reads the addresses. The step therefore notices `p.data = ...`, replaced states and replaced
/// gradients, and tensors that their owner drops are freed immediately. Between steps only
/// workspaces are kept: at most 88 bytes per chunk of up to 16,384 gradient elements, on each
/// device.
///
/// Only one thread at a time may use an object.
class TORCHFUSE_API FusedStep {
 public:
  /// @param algorithm name of a registered update, such as "adam".
  /// @param caller function that the user calls; error messages begin with this name.
  /// @throws c10::Error for an unknown algorithm.
  explicit FusedStep(const std::string& algorithm, std::string caller = "FusedStep::step");
  ~FusedStep();
  /// Movable, not copyable.
  FusedStep(FusedStep&&) noexcept;
  /// Movable, not copyable.
  FusedStep& operator=(FusedStep&&) noexcept;

  /// Returns the algorithm's hyper-parameters, in the order in which step() expects their values.
  const std::vector<HyperParamInfo>& hyper_params() const;
  /// Returns the algorithm's state names, in the order of FusedSlot::states.
  const std::vector<std::string>& state_names() const;
  /// Returns how many of the last states are tensor states, with one number per tensor.
  std::size_t num_tensor_states() const;

  /// Replaces the plan. Checks every slot; after an error the old plan stays. A state or master
  /// with the parameter's sizes but other strides gets the parameter's strides, in place: the same
  /// tensor object, with equal values, in new memory.
  /// @throws c10::Error naming the slot's group and position, and the tensor that does not fit.
  void plan(const std::vector<FusedSlot>& slots);
  bool planned() const;  ///< whether there is a plan
  void reset();          ///< removes the plan

  /// Steps all slots that have a gradient. All checks precede all writes.
  ///
  /// @param slots tensors of the plan's slots, in the plan's order. The tensors must live until the
  ///   call returns.
  /// @param groups `groups[slot.group]` contains the values of hyper_params().
  /// @param options see FusedStepOptions.
  /// @return false if the tensors do not match the plan: nothing was done, and plan() must be
  ///   called.
  /// @throws c10::Error for invalid gradients, hyper-parameters or options.
  [[nodiscard]] bool step(const std::vector<SlotTensors>& slots,
                          const std::vector<std::vector<HyperParam>>& groups,
                          const FusedStepOptions& options = {});
  /// Steps slots that the caller keeps, with the parameters' gradients. Calls plan() if the tensors
  /// do not match the plan.
  void step(const std::vector<FusedSlot>& slots, const std::vector<std::vector<HyperParam>>& groups,
            const FusedStepOptions& options = {});

  /// Returns the L2 norm of the last step's unscaled gradients (0-dim fp32, on the device): NaN if
  /// the step neither clipped nor checked, otherwise 0 without gradients. Undefined before the
  /// first step.
  at::Tensor total_norm() const;
  /// Returns 1 if the last step was skipped, else 0 (0-dim fp32, on the device). Undefined before
  /// the first step.
  at::Tensor skipped() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace torchfuse
