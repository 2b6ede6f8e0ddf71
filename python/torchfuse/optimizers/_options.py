# SPDX-License-Identifier: BSD-3-Clause
"""The options that every fused optimizer takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

#: Keys of torch.optim's groups that choose among torch's implementations and mean nothing here,
#: with what torch's classes look for.
TORCH_ONLY: Mapping[str, Any] = {"foreach": None, "fused": None, "differentiable": False}


class BasicOptions(TypedDict, total=False):
    """Options that every fused optimizer takes by keyword alone.

    Attributes:
        master_weights: keep an fp32 copy of every fp16 and bf16 parameter as
            `state["master_param"]`, update it, and round it to the parameter. It is made from the
            parameter in its first step.
        write_back_grads: leave the unscaled and clipped gradients in `.grad`; otherwise gradients
            are never modified.
        skip_non_finite: skip a step with a non-finite gradient element even without a scaler.
        state_dtype: dtype of the states: fp32, bf16 or fp16, whatever the parameter's own; fp64 for
            fp64 parameters. None: fp32 for 16-bit parameters, else the parameter's dtype.
        store_param_remainders: keep of each bf16 parameter's master only the 16 bits that the
            parameter lacks, as `state["param_remainder"]`. Needs `master_weights`.
        master_weight_dtype: dtype of the masters, for programs written for TransformerEngine:
            torch.float32, which they are anyway. Others are refused.
        stochastic_rounding: round bf16 parameters without masters at random, without bias.
        seed: of the random bits of `stochastic_rounding`.
        fused: torch's argument, False or None: every class here is always fused.
        foreach: torch's, likewise.
        differentiable: torch's, likewise: the step has no derivative.
    """

    master_weights: bool
    write_back_grads: bool
    skip_non_finite: bool
    state_dtype: torch.dtype | None
    store_param_remainders: bool
    master_weight_dtype: torch.dtype
    stochastic_rounding: bool
    seed: int
    fused: bool | None
    foreach: bool | None
    differentiable: bool | None


class CommonOptions(BasicOptions, total=False):
    """The same, for classes that apex gave no position to `max_grad_norm`.

    Attributes:
        max_grad_norm: clip the norm of the unscaled gradients, over all groups, inside the step, as
            `torch.nn.utils.clip_grad_norm_`. `math.inf` only measures it.
    """

    max_grad_norm: float | None


class StepOptions(CommonOptions, total=False):
    """The same, for classes that apex gave no position to `set_grad_none`.

    Attributes:
        set_grad_none: `zero_grad()` removes gradients instead of filling them with zeros; the
            default.
    """

    set_grad_none: bool


def as_tensor(value: float | Tensor, device: torch.device) -> Tensor:
    """A hyper-parameter as an fp64 tensor, so that a step computes with the same value."""
    if isinstance(value, Tensor):
        return value.to(device)
    return torch.tensor(value, dtype=torch.float64, device=device)
