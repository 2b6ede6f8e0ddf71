# SPDX-License-Identifier: BSD-3-Clause
"""Checks the arguments of DistributedDataParallel."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

_NAME = "DistributedDataParallel"


def check_at_least_one(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{_NAME}: expected {name} to be an int of at least 1, got {value!r}.")


def check_removed(shared_param: bool | None, split_factor: float | None) -> None:
    if shared_param is not None:
        raise ValueError(
            f"{_NAME}: expected shared_param to be None, got {shared_param!r}. Shared parameters "
            "need no option. To reduce after the backward pass, pass delay_allreduce=True."
        )
    if split_factor is not None:
        raise ValueError(
            f"{_NAME}: expected gradient_average_split_factor to be None, got {split_factor!r}. "
            "Pass gradient_predivide_factor."
        )


def check_delayed(delay: bool, streams: int, triggers: Iterable[Tensor] | None) -> None:
    if delay and streams > 1:
        raise ValueError(
            f"{_NAME}: expected num_allreduce_streams to be 1 with delay_allreduce=True, "
            f"got {streams}. Pass only one of these arguments."
        )
    if delay and triggers is not None:
        raise ValueError(
            f"{_NAME}: expected allreduce_trigger_params to be None with delay_allreduce=True, "
            "got parameters. Pass only one of these arguments."
        )


def check_predivide_factor(value: float) -> None:
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
        raise ValueError(
            f"{_NAME}: expected gradient_predivide_factor to be positive and finite, got {value!r}."
        )


def check_trigger_params(module: nn.Module, triggers: Iterable[Tensor] | None) -> None:
    known = {id(parameter) for parameter in module.parameters()}
    for index, parameter in enumerate(triggers or ()):
        if id(parameter) not in known:
            raise ValueError(
                f"{_NAME}: expected allreduce_trigger_params[{index}] to be a parameter of module, "
                f"got {type(parameter).__name__}. Use items of module.parameters()."
            )


def check_communicators(communicators: Sequence[Sequence[Any]] | None, streams: int) -> None:
    if communicators is None:
        return
    if streams == 1 or [len(items) for items in communicators] != [streams, streams]:
        raise ValueError(
            f"{_NAME}: expected allreduce_communicators to contain num_allreduce_streams groups "
            f"and as many streams, at least 2, got {[len(items) for items in communicators]} and "
            f"num_allreduce_streams={streams}."
        )
    for index, group in enumerate(communicators[0]):
        if dist.get_world_size(group) != dist.get_world_size():
            raise ValueError(
                f"{_NAME}: expected allreduce_communicators[0][{index}] to span all "
                f"{dist.get_world_size()} processes, got {dist.get_world_size(group)}. Gradients "
                "are always reduced over the default group."
            )
