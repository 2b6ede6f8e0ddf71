# SPDX-License-Identifier: BSD-3-Clause
"""The package's private native module (csrc/bindings)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

def hyper_params_of(algorithm: str) -> list[tuple[str, bool, float, bool]]:
    """Returns an algorithm's hyper-parameters in the order of the op's schema and of the step.

    Each entry contains the name, whether the hyper-parameter is a flag, a number's exclusive upper
    bound, and whether the number must be on the host.
    """

def check_hyper_params(
    algorithm: str,
    places: Sequence[str],
    values: Sequence[Any],
    caller: str,
    group: int,
    read_devices: bool,
) -> None:
    """Checks one group's values as a step does. With `read_devices`, reads device tensors too."""

def check_hyper_param(algorithm: str, name: str, value: Any, expected: str) -> None:
    """Checks a number against a hyper-parameter's range. Messages begin with `expected`."""

class FusedStep:
    """The native step of one optimizer: plan, checks, norm, update.

    Holds no tensors between steps. Only one thread may use the object at a time.

    Args:
        algorithm: Name of the algorithm, e.g. "adam".
        caller: Beginning of messages: the function that the user calls.
        places: Each hyper-parameter's place in a group, such as "betas[0]".
    """

    def __init__(
        self, algorithm: str, caller: str = "FusedStep.step", places: Sequence[str] = []
    ) -> None: ...
    @property
    def state_names(self) -> list[str]: ...
    @property
    def tensor_state_names(self) -> list[str]: ...
    @property
    def planned(self) -> bool: ...
    def plan(
        self,
        param_lists: list[Sequence[Tensor]],
        owner: dict[Any, Any],
        stochastic: list[bool] = [],
        shard_groups: list[list[str] | None] = [],
        numbers: list[tuple[int, int, int]] = [],
        exchanges: list[tuple[str, int]] = [],
    ) -> None:
        """Replaces the plan. After an error the previous plan remains.

        Args:
            param_lists: Parameters of each group.
            owner: The optimizer's state, with a dictionary for each planned parameter.
            stochastic: Whether to round stochastically, per group.
            shard_groups: Names of the process groups that shard a DTensor, per parameter. None for
                plain tensors.
            numbers: First index, run length (0: one run) and distance between runs in the full
                tensor, per parameter.
            exchanges: Name of the process group that exchanges a sharded matrix of FusedMuon, per
                parameter, and a checksum of the parameter's name. Empty for other parameters; 0 for
                parameters without a name.
        """

    def step(
        self,
        param_lists: list[Sequence[Tensor]],
        owner: dict[Any, Any],
        groups: list[Sequence[float | bool | Tensor]],
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        check_inside: bool = False,
        max_grad_norm: float | None = None,
        skip_norm_above: float | Tensor | None = None,
        write_back_grads: bool | str = False,
        seed: int = 0,
        ema: tuple[float, bool, int] | None = None,
        update_from_the_end: bool = False,
        found_inf_is_output: bool = False,
        norm_groups: Sequence[str] = [],
        norm_device: torch.device | None = None,
        clip_apart: list[bool] = [],
    ) -> bool:
        """Updates all parameters that have a gradient.

        Args:
            param_lists: Current parameters of each group.
            owner: The optimizer's current state.
            groups: Each group's values in the order of `hyper_params_of`.
            grad_scale: Loss scale by which gradients are divided. None means 1.
            found_inf: Non-zero skips the step.
            check_inside: Skip the step if a gradient is non-finite.
            max_grad_norm: Maximum gradient norm. None disables clipping.
            skip_norm_above: Gradient norm above which the step is skipped. None skips no step.
            write_back_grads: Gradients to store: False, True or "clipped", or "unscaled".
            seed: Seed of stochastic rounding.
            ema: Decay, warm-up and start step of moving averages. None keeps averages unchanged.
            update_from_the_end: Update from the last parameter to the first on CUDA devices.
            found_inf_is_output: Overwrite `found_inf` with 1 or 0.
            norm_groups: Names of process groups whose processes step other parameters.
            norm_device: Device for reductions over `norm_groups`. None: the CPU.
            clip_apart: Per group. Groups with True share a clipping norm, and all other groups
                share another. Empty: all groups share one norm.

        Returns:
            False, without any change, if the plan no longer matches the tensors.
        """

    def total_norm(self) -> Tensor | None: ...
    def skipped(self) -> Tensor | None: ...

def step_views(params: list[Tensor], steps: list[Tensor | None]) -> list[Tensor]:
    """Returns step counts as 0-dim views into one buffer per device."""

def swap_ema_(param: Tensor, ema: Tensor, kept: Tensor | None = None) -> Tensor | None:
    """Exchanges a parameter and its average; returns a 16-bit parameter's former value."""

def check_pickle(bytes: bytes, where: str) -> None:
    """Raises ValueError unless a pickle contains only plain values and dense tensors."""

def remake_master(param: Tensor, master: Tensor) -> None: ...
def take_master(param: Tensor, master: Tensor) -> None:
    """Copies the master to a parameter that was converted to fp32 or fp64."""

def master_of_remainder(param: Tensor, remainder: Tensor) -> Tensor:
    """Returns the fp32 master of a bf16 parameter with an int16 remainder."""

def remainder_of_master(master: Tensor) -> Tensor:
    """Returns the int16 remainder. The bf16 parameter is `master` rounded to nearest even."""

def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns the tensor on `device`. Only a copy to the CPU synchronizes the host."""

class GradScalerCore:
    """Device state of torchfuse.amp.GradScaler."""

    scale: Tensor | None
    growth_tracker: Tensor | None
    def __init__(
        self,
        *,
        hysteresis: int = 1,
        min_scale: float | None = None,
        max_scale: float | None = None,
        dynamic: bool = True,
        process_group: str | None = None,
        history_size: int = 0,
    ) -> None: ...
    @property
    def step_counts(self) -> Tensor | None: ...
    def counts(self) -> list[int]: ...
    def set_counts(self, counts: Sequence[int]) -> None: ...
    def scale_history(self) -> list[tuple[int, float, bool]]: ...
    def inv_scale(self) -> Tensor: ...
    def initialize(self, device: torch.device, scale: float, growth_tracker: int) -> None: ...
    def hysteresis_tracker(self) -> int: ...
    def set_hysteresis_tracker(self, value: int) -> None: ...
    def found_inf(self, optimizer: int, device: torch.device) -> Tensor: ...
    def unscale_(
        self,
        optimizer: int,
        params: Sequence[Tensor],
        inv_scale: Tensor,
        allow_fp16: bool = False,
    ) -> list[Tensor]: ...
    def check(self, optimizer: int, params: Sequence[Tensor]) -> list[Tensor]: ...
    def combine(self, flags: Sequence[Tensor]) -> Tensor: ...
    def update(
        self,
        flags: Sequence[Tensor],
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        adjust: bool = True,
    ) -> None: ...

def get_total_norm(
    tensors: Sequence[Tensor | None],
    norm_type: float,
    shard_groups: Sequence[Sequence[str]] = [],
) -> Tensor:
    """Returns the norm over all tensors. `shard_groups` names the groups that shard each tensor."""

def clip_with_norm_(
    tensors: Sequence[Tensor | None], max_norm: float, total_norm: Tensor
) -> None: ...
def clip_value_(tensors: Sequence[Tensor | None], clip_value: float) -> None: ...
def check_same_in_all_ranks(
    names: Sequence[str], values: Sequence[int], device: torch.device, group: str, caller: str
) -> None: ...
def all_reduce_(tensor: Tensor, reduction: str, groups: Sequence[str], caller: str) -> None:
    """Reduces `tensor` in place over each process group in turn.

    Args:
        tensor: Tensor to reduce.
        reduction: "sum", "max", ...
        groups: Names of process groups.
        caller: Beginning of messages.
    """

def describe_missing_ranks(group: str) -> str:
    """Describes the ranks that report no failure after a collective failed.

    Every rank whose collective failed must call this function.

    Args:
        group: Name of the process group.
    """

def cpu_isa() -> str: ...
def set_cpu_isa(name: str) -> None: ...
def multi_tensor_l2_norm(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Calls the operator of torch.ops without boxing. torch.compile cannot trace the call."""

def multi_tensor_unscale_(tensors: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Calls the operator of torch.ops without boxing. torch.compile cannot trace the call."""

def fused_adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    master_params: Sequence[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool = False,
    maximize: bool = False,
    adam_w_mode: bool = True,
    bias_correction: bool = True,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Calls the operator of torch.ops without boxing. torch.compile cannot trace the call."""

def fused_sgd_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    master_params: Sequence[Tensor],
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool = False,
    wd_after_momentum: bool = False,
    maximize: bool = False,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Calls the operator of torch.ops without boxing. torch.compile cannot trace the call."""

def fused_adagrad_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    sums: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    master_params: Sequence[Tensor],
    lr: float,
    lr_decay: float,
    eps: float,
    weight_decay: float,
    adagrad_w_mode: bool = False,
    maximize: bool = False,
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Calls the operator of torch.ops without boxing. torch.compile cannot trace the call."""

def l2norm_on_host(noop_flag: object, tensor_lists: object) -> tuple[Tensor, Tensor] | None:
    """Fast path of `amp_C.multi_tensor_l2norm` on the CPU, without per-tensor norms.

    Returns:
        None, without any effect, for arguments that Python must check one by one.
    """

def scale_on_host(noop_flag: object, tensor_lists: object, scale: float) -> bool:
    """Fast path of `amp_C.multi_tensor_scale` on the CPU for in-place scaling.

    Returns:
        False, without any effect, for arguments that Python must check one by one.
    """

def lists_match(lists: list[list[Tensor]]) -> bool:
    """Returns whether equally long lists contain dense tensors that match.

    All tensors in a list must share dtype and device. Tensors at the same index in different lists
    must share device, sizes and strides. False means that Python must check the entries, which may
    be any object.
    """
