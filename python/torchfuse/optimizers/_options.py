# SPDX-License-Identifier: BSD-3-Clause
"""The options that every fused optimizer takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

#: What a step stores in gradients. True stands for "clipped".
WriteBackGrads = bool | Literal["unscaled", "clipped"]

#: Keys of torch.optim's groups that choose among torch's implementations and have no meaning here,
#: with the values that torch's classes expect.
TORCH_ONLY: Mapping[str, Any] = {"foreach": None, "fused": None, "differentiable": False}


class TorchOnlyOptions(TypedDict, total=False):
    """Arguments of torch's classes, for programs written for them.

    Attributes:
        fused: False or None: every class is always fused.
        foreach: False or None.
        differentiable: False or None: the step has no derivative.
    """

    fused: bool | None
    foreach: bool | None
    differentiable: bool | None


class BasicOptions(TorchOnlyOptions, total=False):
    """Options that every fused optimizer takes by keyword only.

    Attributes:
        master_weights: keep an fp32 master of every fp16 and bf16 parameter in
            `state["master_param"]`; the step updates the master and rounds it to the parameter.
        write_back_grads: store gradients in `.grad`: "unscaled" or, with "clipped" or True, also
            clipped. False or None: gradients are never modified.
        skip_non_finite: skip a step with a non-finite gradient element even without a scaler.
        state_dtype: dtype of the states: fp32, bf16 or fp16; fp64 for fp64 parameters. None: fp32
            for 16-bit parameters, else the parameter's dtype.
        store_param_remainders: store only the 16 bits of a bf16 parameter's master that the
            parameter lacks, in `state["param_remainder"]`. Requires `master_weights`.
        master_weight_dtype: must be torch.float32; for programs written for TransformerEngine.
        stochastic_rounding: round bf16 parameters without masters at random, without bias.
        seed: seed of `stochastic_rounding`.
        ema_decay: decay of exponential moving averages of the parameters, in
            `state["ema_param"]`, which the step moves. None: no averages.
        ema_warmup: limit the decay to (1 + n) / (10 + n) in the n-th step of the average.
        ema_start_step: number of steps before the average begins; it is a copy until then.
        norm_groups: process groups, or device meshes of one dimension, whose processes step other
            parameters of one model, as the stages of a pipeline do. Norm, clipping and the decision
            to skip a step are then those of all gradients. All processes give groups in the same
            order and the same `max_grad_norm`, and make the same steps and calls of a scaler, which
            has to be torchfuse's, with gradients or without. Not part of checkpoints.
    """

    master_weights: bool
    write_back_grads: WriteBackGrads | None
    skip_non_finite: bool
    state_dtype: torch.dtype | None
    store_param_remainders: bool
    master_weight_dtype: torch.dtype
    stochastic_rounding: bool
    seed: int
    ema_decay: float | None
    ema_warmup: bool
    ema_start_step: int
    norm_groups: Sequence[dist.ProcessGroup | dist.device_mesh.DeviceMesh] | None


class CommonOptions(BasicOptions, total=False):
    """`BasicOptions` for classes that do not take `max_grad_norm` by position.

    Attributes:
        max_grad_norm: clip the norm of the unscaled gradients over all groups, inside the step, as
            `torch.nn.utils.clip_grad_norm_` does. `math.inf` only measures it. None: no clipping.
    """

    max_grad_norm: float | None


class StepOptions(CommonOptions, total=False):
    """`CommonOptions` for classes that do not take `set_grad_none` by position.

    Attributes:
        set_grad_none: `zero_grad()` sets gradients to None (default), not to zeros.
    """

    set_grad_none: bool


def as_tensor(value: float | Tensor, device: torch.device) -> Tensor:
    """Returns a hyper-parameter as a tensor, fp64 for a number, so that no digits are lost."""
    if isinstance(value, Tensor):
        return value.to(device)
    return torch.tensor(value, dtype=torch.float64, device=device)
