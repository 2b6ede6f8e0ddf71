# SPDX-License-Identifier: BSD-3-Clause
"""The native module (csrc/bindings), private to the package."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

def hyper_params_of(algorithm: str) -> list[tuple[str, bool, float]]:
    """The hyper-parameters of an algorithm, in the order of its op's schema and of its step.

    Each entry has the name, whether it is a flag, and the exclusive upper bound of a number.
    """

def check_hyper_params(
    algorithm: str,
    places: Sequence[str],
    values: Sequence[Any],
    caller: str,
    group: int,
    read_devices: bool,
) -> None:
    """Checks the values of one group as a step does; `read_devices`: also those on a device."""

def check_hyper_param(algorithm: str, name: str, value: Any, expected: str) -> None:
    """Checks one number by the range of a hyper-parameter; `expected` begins a message."""

class FusedStep:
    """The native step of one optimizer: plan, checks, norm, update.

    It holds no tensors between steps and may be used by one thread at a time.

    Args:
        algorithm: name of the update, e.g. "adam".
        caller: name of the function that the user calls; error messages begin with it.
        places: for each hyper-parameter where a group holds it, such as "betas[0]".
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
    ) -> None:
        """Replaces the plan; after an error the previous plan remains.

        Args:
            param_lists: the parameters of each group.
            owner: the optimizer's state, with a dictionary for each parameter of the plan.
            stochastic: for each group, whether its parameters are rounded stochastically.
            shard_groups: for each parameter, None or, for a DTensor, the names of the process
                groups that it is sharded over.
            numbers: for each parameter, the number of its first element in the whole one, the
                elements of a run (0: all) and the distance between runs.
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
    ) -> bool:
        """Updates all parameters that have a gradient.

        Args:
            param_lists: the current parameters of each group.
            owner: the current state of the optimizer.
            groups: for each group, values in the order of `hyper_params_of`.
            seed: seed of stochastic rounding.
            ema: decay, warm-up and start step of the parameters' averages; None: they stay.
            update_from_the_end: on CUDA devices, from the last parameter to the first.
            found_inf_is_output: it becomes 1 or 0, whatever it was.
            norm_groups: names of process groups whose processes step other parameters.
            norm_device: device of the reductions over them; None: the CPU.

        Returns:
            False if the plan no longer fits; nothing has been changed then.
        """

    def total_norm(self) -> Tensor | None: ...
    def skipped(self) -> Tensor | None: ...

def step_views(params: list[Tensor], steps: list[Tensor | None]) -> list[Tensor]:
    """Step counts as 0-dim views of separate elements of one buffer per device."""

def swap_ema_(param: Tensor, ema: Tensor, kept: Tensor | None = None) -> Tensor | None:
    """Exchanges a parameter and its average; returns what puts a 16-bit parameter back."""

def check_pickle(bytes: bytes, where: str) -> None:
    """Raises ValueError unless a pickle holds plain values and dense tensors only."""

def remake_master(param: Tensor, master: Tensor) -> None: ...
def take_master(param: Tensor, master: Tensor) -> None:
    """Gives a parameter that became fp32 or fp64 the value of its master."""

def master_of_remainder(param: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of a bf16 parameter whose state is a remainder (int16)."""

def remainder_of_master(master: Tensor) -> Tensor:
    """The int16 remainder of `master`, whose bf16 parameter is `master` rounded to nearest even."""

def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; the host waits for a copy to the CPU, but not for one to CUDA."""

class GradScalerCore:
    """The device side of torchfuse.amp.GradScaler."""

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
    """The norm over all tensors, each sharded over the process groups named in its entry."""

def clip_with_norm_(
    tensors: Sequence[Tensor | None], max_norm: float, total_norm: Tensor
) -> None: ...
def clip_value_(tensors: Sequence[Tensor | None], clip_value: float) -> None: ...
def check_same_in_all_ranks(
    names: Sequence[str], values: Sequence[int], device: torch.device, group: str, caller: str
) -> None: ...
def all_reduce_(tensor: Tensor, reduction: str, groups: Sequence[str], caller: str) -> None:
    """Reduces `tensor` in place over the processes of each group in turn; "sum", "max", ...

    Args:
        groups: names of process groups.
        caller: begins messages.
    """

def describe_missing_ranks(group: str) -> str:
    """Says which ranks do not report a failure of their own after a collective that failed.

    Args:
        group: name of the process group. All ranks whose collective failed call this.
    """

def cpu_isa() -> str: ...
def set_cpu_isa(name: str) -> None: ...
def multi_tensor_l2_norm(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The operator, without the boxes of torch.ops; torch.compile cannot trace it."""

def multi_tensor_unscale_(tensors: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """The operator, without the boxes of torch.ops; torch.compile cannot trace it."""

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
    """The operator, without the boxes of torch.ops; torch.compile cannot trace it."""

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
    """The operator, without the boxes of torch.ops; torch.compile cannot trace it."""

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
    """The operator, without the boxes of torch.ops; torch.compile cannot trace it."""

def l2norm_on_host(noop_flag: object, tensor_lists: object) -> tuple[Tensor, Tensor] | None:
    """`amp_C.multi_tensor_l2norm` on the CPU, without the norms of each.

    Returns:
        None, after nothing has happened, for arguments that are to be looked at one by one.
    """

def scale_on_host(noop_flag: object, tensor_lists: object, scale: float) -> bool:
    """`amp_C.multi_tensor_scale` on the CPU, of lists that are the same.

    Returns:
        False, after nothing has happened, for arguments that are to be looked at one by one.
    """

def lists_match(lists: list[list[Tensor]]) -> bool:
    """Whether lists of equal length hold dense tensors of one dtype and device for each list.

    The entries of one index must also be equal in device, sizes and strides. False says only that
    the lists are to be looked at one by one: entries may be anything.
    """
